"""What codecs save, cost and lose: sizes, GB/s beside a plain copy, and what a model makes of it.

    python -m benchmarks codec [--small] [--only PART] [--docs]

The model is SmolLM2-135M-Instruct (`make smollm2` installs its package); with `--small` a Llama
that is trained now if it is not there (`train_small_llama`). Sizes and speeds are of blocks in the
shapes of known models, filled with its KV: heads of many prompts side by side. They include the
4 KiB header of a stored block. GB are 10^9 bytes of KV as it is on the device; the limit is a plain
copy of the same bytes with as many threads in the same round. Codecs take turns. What is lost is
judged by the model itself (`codec_quality`), also of codecs as they could be (`codec_variants`);
what its KV has that codecs live on is shown beside that of random weights (`codec_structure`).
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.codec_quality import (
    BLOCK_TOKENS,
    Judge,
    Words,
    document_windows,
    held_out_windows,
    ranks_agree,
)
from benchmarks.codec_report import DOC, PAGE, losses, speed_tables, structure, varied_table
from benchmarks.codec_structure import structures
from benchmarks.codec_variants import variants
from benchmarks.command_line import parser_of
from benchmarks.documents import update
from benchmarks.facts import RESULTS, ROOT, header, shown, write
from benchmarks.stats import spread
from benchmarks.train_small_llama import OUT, STEPS, small_llama
from sglang_cake.codecs.catalogue import chain_of, decode
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES, HEADER_BYTES
from sglang_cake.codecs.pipeline import Chain, Raw
from sglang_cake.codecs.zstd import BytePlanes, Zstd
from sglang_cake.core.codec_names import CODECS, LOSSY, RAW
from sglang_cake.core.layout import BlockLayout
from sglang_cake.demo.smollm2 import NAME, smollm2

COPY = "plain copy"
PARTS = ("structure", "quality", "variants", "speed")
PREFIX_BLOCKS, AFTER_TOKENS = 16, 256
# As far back as the toy looks: with a longer prefix it reads on no better, but worse.
TOY_PREFIX_BLOCKS, TOY_AFTER_TOKENS, TOY_WINDOWS = 2, 128, 8
THETA = 10000.0  # of RoPE, where only sizes and speeds are measured
LEAST_S = 0.05  # of one measurement: what is faster is done several times


@dataclass(frozen=True)
class Shape:
    """A model's KV, as one rank has it."""

    name: str
    layers: int
    heads: int
    head: int

    @property
    def layout(self) -> BlockLayout:
        parts = (("k", (self.heads, self.head)), ("v", (self.heads, self.head)))
        return BlockLayout.plain(self.layers, parts, "bfloat16", BLOCK_TOKENS)


SHAPES = (
    Shape("Llama-3.1-8B", 32, 8, 128),
    Shape("Llama-3.1-70B, 1 of 8 ranks", 80, 1, 128),
    Shape("LongAlpaca-13B, 6 of 40 layers", 6, 40, 128),
    Shape("SmolLM2-135M", 30, 3, 64),
)


def named(layout: BlockLayout, theta: float) -> dict[str, Chain]:
    """Every codec as a server with this KV would use it."""
    return {codec: chain_of(codec, layout, theta) for codec in CODECS if codec != RAW}


def settings_of_zstd() -> dict[str, Chain]:
    """Without the shuffle, and other levels: why the codec is set as it is."""
    return {
        "plain zstd 1": Chain(Raw(), compressors=(Zstd(1),)),
        "plain zstd 9": Chain(Raw(), compressors=(Zstd(9),)),
        "zstd 1 (the codec)": Chain(BytePlanes(), compressors=(Zstd(1),)),
        "zstd -5": Chain(BytePlanes(), compressors=(Zstd(-5),)),
        "zstd 3": Chain(BytePlanes(), compressors=(Zstd(3),)),
        "zstd 9": Chain(BytePlanes(), compressors=(Zstd(9),)),
        "zstd 1, long": Chain(BytePlanes(), compressors=(Zstd(1, long=True),)),
    }


def filled(shape: Shape, blocks: Words, count: int) -> list[bytes]:
    """Blocks of a shape, of the model's planes `[blocks, layers, 2, tokens, channels]`.

    A plane as wide as the shape's is planes of other prompts beside each other; none is used twice
    in a block.
    """
    keys, values = (blocks[:, :, i].reshape(-1, *blocks.shape[3:]) for i in range(2))
    wide = shape.heads * shape.head
    each = -(-wide // keys.shape[2])
    assert len(keys) >= shape.layers * each, (len(keys), shape)
    made = []
    for index in range(count):
        turned = [np.roll(planes, -7 * index, axis=0) for planes in (keys, values)]
        rows = []
        for layer in range(shape.layers):
            for planes in turned:
                beside = planes[layer * each : (layer + 1) * each]
                rows.append(beside.transpose(1, 0, 2).reshape(BLOCK_TOKENS, -1)[:, :wide])
        made.append(np.ascontiguousarray(np.stack(rows)).tobytes())
    return made


class Arm:
    """One codec on blocks of one shape, one for each thread."""

    def __init__(self, layout: BlockLayout, chain: Chain | None, blocks: list[bytes]) -> None:
        """Args: chain: None copies."""
        self._layout, self._chain = layout, chain
        self._blocks = [memoryview(block) for block in blocks]
        size = layout.block_bytes
        self._payloads = [memoryview(bytearray(size + ENCODED_HEAD_BYTES)) for _ in blocks]
        self._outs = [memoryview(bytearray(size)) for _ in blocks]
        self.sizes = [size] * len(blocks)

    def encode(self, index: int) -> None:
        if self._chain is None:
            np.copyto(
                np.frombuffer(self._payloads[index], np.uint8)[: self._layout.block_bytes],
                np.frombuffer(self._blocks[index], np.uint8),
            )
        else:
            self.sizes[index] = self._chain.encode(
                self._layout, self._blocks[index], self._payloads[index]
            )

    def decode(self, index: int) -> None:
        payload = self._payloads[index][: self.sizes[index]]
        if self._chain is None:
            np.copyto(np.frombuffer(self._outs[index], np.uint8), np.frombuffer(payload, np.uint8))
        else:
            decode(self._layout, payload, self._outs[index])

    def kept(self) -> bool:
        """Whether every bit came back."""
        return all(out == block for out, block in zip(self._outs, self._blocks, strict=True))


def timed(work: Callable[[int], None], threads: int, pool: ThreadPoolExecutor | None) -> float:
    """Seconds a turn, in which every thread did its block once; one thread needs no pool."""
    turns, begun_s = 0, time.perf_counter()
    while True:
        if threads == 1 or pool is None:
            work(0)
        else:
            list(pool.map(work, range(threads)))
        turns += 1
        took_s = time.perf_counter() - begun_s
        if took_s >= LEAST_S:
            return took_s / turns


def speeds(
    shape: Shape, chains: dict[str, Chain], blocks: Words, *, repeats: int, cores: int
) -> list[dict[str, Any]]:
    """One row for each codec, the plain copy among them."""
    layout = shape.layout
    made = filled(shape, blocks, cores)
    arms = {COPY: Arm(layout, None, made)}
    arms |= {name: Arm(layout, chain, made) for name, chain in chains.items()}
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ThreadPoolExecutor(cores) as pool:
        for turn in range(repeats + 1):
            print(f"  {shape.name}: round {turn}/{repeats}", flush=True)
            for name, arm in arms.items():
                for threads in sorted({1, cores}):
                    for what, work in (("encode", arm.encode), ("decode", arm.decode)):
                        rate = threads * layout.block_bytes / timed(work, threads, pool) / 1e9
                        key = f"{what}_gb_per_s_{'1_core' if threads == 1 else 'all_cores'}"
                        rates[name, key] += [rate] if turn else []  # the first round warms up
    return [_row(shape, name, arm, rates) for name, arm in arms.items()]


def _row(
    shape: Shape, name: str, arm: Arm, rates: dict[tuple[str, str], list[float]]
) -> dict[str, Any]:
    size = float(np.mean(arm.sizes)) + HEADER_BYTES
    found = {key: spread(values) for (arm_name, key), values in rates.items() if arm_name == name}
    to_copy = {
        key.replace("gb_per_s", "to_copy"): spread(
            [a / b for a, b in zip(values, rates[COPY, key], strict=True)]
        )
        for (arm_name, key), values in rates.items()
        if arm_name == name
    }
    return {
        "shape": shape.name,
        "codec": name,
        "bytes_per_token": round(size / BLOCK_TOKENS, 2),
        "ratio": round(shape.layout.block_bytes / size, 4),
        "keeps_every_bit": arm.kept(),
        **found,
        **to_copy,
    }


def judged(judge: Judge) -> dict[str, Any]:
    """What every codec that loses bits loses, with the first token kept and without; and whether
    the measure of `--cake-max-error` ranks them."""
    found: dict[str, Any] = {"quality": {}, "no_sink": {}}
    for name in LOSSY:
        print(f"  what {name} loses", flush=True)
        chain = chain_of(name, judge.layout, judge.theta)
        found["quality"][name] = judge.judge(chain)
        found["no_sink"][name] = judge.judge(chain, exact_first=False)
    rows = found["quality"].values()
    pairs = [
        pair
        for row in rows
        for pair in zip(row["error_by_window"], row["kl_by_window"], strict=True)
    ]
    found["ranks"] = {
        "codecs": round(ranks_agree([(row["error"], row["kl"]) for row in rows]), 3),
        "codecs_and_texts": round(ranks_agree(pairs), 3),
    }
    return found


def varied(judge: Judge, repeats: int) -> dict[str, Any]:
    """What every variant of a codec loses, and how fast one core decodes it."""
    shape = SHAPES[0]
    made = filled(shape, judge.blocks(), 1)
    arms = {
        name: Arm(shape.layout, chain, made)
        for name, chain in variants(shape.layout, THETA).items()
    }
    rates: dict[str, list[float]] = defaultdict(list)
    for turn in range(repeats + 1):
        for name, arm in arms.items():
            arm.encode(0)
            rate = shape.layout.block_bytes / timed(arm.decode, 1, None) / 1e9
            rates[name] += [rate] if turn else []  # the first round warms up
    found = {}
    for name, chain in variants(judge.layout, judge.theta).items():
        print(f"  what {name} loses", flush=True)
        found[name] = judge.judge(chain) | {"decode_gb_per_s_1_core": spread(rates[name])}
    return found


def raced(shapes: Sequence[Shape], blocks: Words, repeats: int, cores: int) -> list[dict[str, Any]]:
    """Sizes and speeds on every shape, and of zstd's settings on the first."""
    rows = []
    for shape in shapes:
        chains = named(shape.layout, THETA)
        if shape is shapes[0]:
            chains |= settings_of_zstd()
        rows += speeds(shape, chains, blocks, repeats=repeats, cores=cores)
    return rows


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_codec", __doc__)
    parser.add_argument("--small", action="store_true", help="one shape, few rounds, little text")
    parser.add_argument("--only", choices=PARTS, help="the other results stay")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one that warms up")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training, with --small")
    parser.add_argument("--docs", action="store_true", help="put the tables into the documents")
    parser.add_argument("--name", default="cpu", help="of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="their folder")
    args = parser.parse_args()
    if args.small:
        args.repeats = 2
    return args


def toy(steps: int) -> Judge:
    """The small Llama, and text that it was not trained on."""
    folder = small_llama(OUT, steps)
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    prefix = TOY_PREFIX_BLOCKS * BLOCK_TOKENS
    tokens = prefix + TOY_AFTER_TOKENS
    return Judge(folder, held_out_windows(tokenizer, windows=TOY_WINDOWS, tokens=tokens), prefix)


def real() -> Judge:
    """SmolLM2, and eight documents. Raises: ConfigError if its package is not installed."""
    folder = smollm2(ROOT / "benchmarks" / ".work")
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    prefix = PREFIX_BLOCKS * BLOCK_TOKENS
    return Judge(folder, document_windows(tokenizer, tokens=prefix + AFTER_TOKENS), prefix)


def main() -> None:
    """Measure, write the results, print the tables."""
    args = parse_args()
    cores = len(os.sched_getaffinity(0))
    judge = toy(args.steps) if args.small else real()
    setting = {
        "model": "small Llama" if args.small else NAME,
        "windows": sum(len(batch.after) for batch in judge.batches),
        "prefix_tokens": judge.prefix,
        "after_tokens": judge.batches[0].after.shape[1],
    }
    texts: dict[str, str] = {}
    parts = PARTS if args.only is None else (args.only,)
    if "structure" in parts:
        result = header("codec-structure", **setting)
        result["structure"] = structures(judge)
        write(args.out / f"codec-structure-{args.name}.json", result)
        texts |= structure(result)
    if "quality" in parts:
        result = header("codec-quality", **setting) | {"bare": judge.bare(), **judged(judge)}
        write(args.out / f"codec-quality-{args.name}.json", result)
        texts |= losses(result)
    if "variants" in parts:
        result = header("codec-variants", repeats=args.repeats, **setting)
        result["variants"] = varied(judge, args.repeats)
        write(args.out / f"codec-variants-{args.name}.json", result)
        texts |= varied_table(result)
    if "speed" in parts:
        shapes = SHAPES[-1:] if args.small else SHAPES
        result = header("codec-speed", repeats=args.repeats, cores=cores)
        result["shapes"] = [asdict(shape) for shape in shapes]
        result["speeds"] = raced(shapes, judge.blocks(), args.repeats, cores)
        result["load_average_after"] = [round(load, 2) for load in os.getloadavg()]
        write(args.out / f"codec-speed-{args.name}.json", result)
        texts |= speed_tables(result)
    print(*texts.values(), f"results in {shown(args.out)}", sep="\n\n")
    if args.docs:
        update(texts, DOC)
        update(texts, PAGE)


if __name__ == "__main__":
    main()
