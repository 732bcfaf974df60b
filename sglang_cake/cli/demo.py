"""`sglang-cake demo`: one prompt, three ways to get its KV, on a real server.

A server computes what a store lacks of the prompt, which fills the store. Then three more servers
compute it again, load it, and do both at once, over a link on which loading takes as long as
computing: the hardest case for either alone. A trained model is asked a question about the text,
and gives the same answer in all three cases.
"""

import argparse
import contextlib
import http.client
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_cake.cli.demo_report import Arm, Arms, DemoFailed, evaluate, report
from sglang_cake.core.codec_names import CHOICES, RAW, check_installed, own_names
from sglang_cake.core.errors import ConfigError
from sglang_cake.demo.event_trace import TRACE_ENV
from sglang_cake.demo.models import build_llama, built_once
from sglang_cake.demo.sglang_server import (
    Reply,
    ServerDied,
    SglangServer,
    cake_metric,
    flush_cache,
    generate,
    has_gpu,
)
from sglang_cake.demo.smollm2 import NAME as SMOLLM2
from sglang_cake.demo.smollm2 import smollm2
from sglang_cake.simulator.shapes import find_shape, kv_token_bytes
from sglang_cake.stores.open_store import check_sources, parse_sources

BLOCK_TOKENS = 128
CHUNK_TOKENS = 512
RANDOM_TOKENS, TRAINED_TOKENS = (8192, 8), (4096, 48)  # of the prompt, to generate
QUESTION = "\n\nQuestion: What is this text about? Answer in one sentence."
STORE_QUIET_S = 5.0  # after so long without a stored block, no more blocks will be stored
MODEL_FORMAT = 1  # raise it when models are built differently: cached ones are rebuilt then
# Large enough that the prompt takes seconds, small enough for two cores (92M parameters; 1.3B).
CPU_MODEL = {"hidden": 768, "layers": 10, "heads": 12, "kv_heads": 4, "vocab": 4096}
GPU_MODEL = {"hidden": 2048, "layers": 24, "heads": 16, "kv_heads": 8, "vocab": 4096}


class ProgressLog:
    """One line per step, with the seconds since the start."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of all arms."""

    model: Path
    gpu: bool
    dtype: str
    prompt: list[int]
    asks: bool  # whether the prompt ends with a question, for a trained model
    new_tokens: int
    repeats: int
    out: Path
    codec: str
    stores: tuple[str, ...]  # URLs, fastest first; without a bandwidth


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="compare computing, loading and both at once on a real server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        help=f"folder of a model, or {SMOLLM2}, a small trained one (default: a small random one)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float16", "bfloat16", "float32"),
        help="of weights and KV (default: auto; of the random model, its own)",
    )
    parser.add_argument("--prompt-tokens", type=int, metavar="N")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="to generate")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each arm")
    parser.add_argument(
        "--store",
        metavar="URL[,URL]",
        help="where KV goes (default: a folder below --out, until the end)",
    )
    parser.add_argument(
        "--codec",
        default=RAW,
        choices=(*CHOICES, *own_names()),
        help="how KV is stored (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path(".demo"), help="folder for all files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every arm gave the same tokens, 1 otherwise. With a lossy codec the tokens
    may differ."""
    # SIGTERM must stop the servers too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    progress = ProgressLog()
    try:
        with contextlib.ExitStack() as ending:
            return _run(args, ending, progress)
    except KeyboardInterrupt:
        progress.say("interrupted; the servers are stopped")
        return 130
    except (DemoFailed, ServerDied) as error:
        progress.say(f"failed: {error}")
        return 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _run(args: argparse.Namespace, ending: contextlib.ExitStack, progress: ProgressLog) -> int:
    setting = _prepare(args, ending, progress)
    cold, stored_share = _fill(setting, progress)
    compute = _arm(setting, "compute", None, progress)
    token_bytes = stored_share * kv_token_bytes(setting.model, setting.dtype)
    prompt_bytes = round(len(setting.prompt) * token_bytes)
    bandwidth = prompt_bytes / statistics.median(compute.ttft_s)
    progress.say(
        f"the prompt's KV is {prompt_bytes / 1e6:.1f} MB as it is stored; capping the link at "
        f"{bandwidth / 1e6:.2f} MB/s, so that loading takes as long as computing"
    )
    load = _arm(setting, "load", bandwidth, progress)
    both = _arm(setting, "both", bandwidth, progress)
    arms = Arms(compute, load, both)
    result = evaluate(arms, cold, bandwidth=bandwidth, prompt_bytes=prompt_bytes)
    result |= {"codec": setting.codec, "stored_share": round(stored_share, 4)}
    if setting.asks:
        result["answers"] = answers_of(setting.model, arms)
        for mode, answer in result["answers"].items():
            progress.say(f"{mode} answers: {answer}")
    report(arms, result, setting.out, progress.say)
    return 0 if result["same_tokens"] or result["lossy"] else 1


def _prepare(
    args: argparse.Namespace, ending: contextlib.ExitStack, progress: ProgressLog
) -> Setting:
    """Args: ending: removes the demo's own store, unless KV goes elsewhere."""
    default = RANDOM_TOKENS if args.model is None else TRAINED_TOKENS
    prompt_tokens = default[0] if args.prompt_tokens is None else args.prompt_tokens
    new_tokens = default[1] if args.new_tokens is None else args.new_tokens
    if prompt_tokens <= 2 * CHUNK_TOKENS or args.repeats < 1 or new_tokens < 1:
        raise DemoFailed(f"needs more than {2 * CHUNK_TOKENS} prompt tokens, one run, one token")
    check_installed(args.codec)
    out = args.out.resolve()
    gpu = has_gpu()
    if args.model not in (None, SMOLLM2):
        _check_model(Path(args.model), prompt_tokens, new_tokens)
    _make_folder(out)
    if args.model is None:
        model, dtype = _random_model(out, gpu, prompt_tokens, progress)
    elif args.model == SMOLLM2:
        model, dtype = smollm2(out), "bfloat16" if gpu else "float32"
        _check_model(model, prompt_tokens, new_tokens)
    else:
        model, dtype = Path(args.model), "auto"
    prompt, asks = make_prompt(model, prompt_tokens, trained=args.model is not None)
    progress.say(f"prompt: {len(prompt):,} tokens of the Python manual; model: {model}")
    if asks:
        progress.say(QUESTION.strip())
    if args.store:
        stores = args.store.split(",")
    else:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="store-", dir=out))
        stores = [Path(folder).as_uri()]
    check_sources(parse_sources(",".join(_throttled(stores, 1e6))))
    return Setting(
        model=model.resolve(),
        gpu=gpu,
        dtype=args.dtype or dtype,
        prompt=prompt,
        asks=asks,
        new_tokens=new_tokens,
        repeats=args.repeats,
        out=out,
        codec=args.codec,
        stores=tuple(stores),
    )


def _make_folder(out: Path) -> None:
    """Make the folder for all files, and see that it can be written. Raises: ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made or written: {error.strerror}") from None


def _check_model(model: Path, prompt_tokens: int, new_tokens: int) -> None:
    """Check the model before a server is started. Raises: ConfigError."""
    config = model / "config.json"
    if not config.is_file():
        raise ConfigError(f"--model {model} is not a model folder: it has no config.json")
    shape = find_shape(str(config))
    if shape.refused is not None:
        raise ConfigError(f"--model {model}: {shape.refused}")
    most = shape.context_tokens - new_tokens - 1
    if prompt_tokens > most:
        raise ConfigError(
            f"--model {model} has a context of {shape.context_tokens:,} tokens: "
            f"set --prompt-tokens {most} or less"
        )


def _throttled(stores: Sequence[str], bytes_per_s: float) -> list[str]:
    """The URLs of the stores, limited to `bytes_per_s` together."""
    each = f"bandwidth={bytes_per_s / len(stores) / 1e6:.3f}MB/s"
    return [f"{url}{'&' if '?' in url else '?'}{each}" for url in stores]


def _random_model(
    out: Path, gpu: bool, prompt_tokens: int, progress: ProgressLog
) -> tuple[Path, str]:
    """Build the model once; later demos find it in `out`."""
    size, dtype = (GPU_MODEL, "bfloat16") if gpu else (CPU_MODEL, "float32")
    max_tokens = max(32768, 2 * prompt_tokens)
    name = "-".join(str(part) for part in (MODEL_FORMAT, dtype, *size.values(), max_tokens))
    model = out / f"model-{name}"
    if not model.is_dir():
        progress.say("building a random Llama (once)")
    built_once(model, lambda path: build_llama(path, **size, dtype=dtype, max_tokens=max_tokens))
    return model, dtype


def make_prompt(model: Path, tokens: int, *, trained: bool) -> tuple[list[int], bool]:
    """The first `tokens` tokens of the language reference that comes with Python; and whether a
    question ends them, which needs a model that was `trained` to chat."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    text = "\n\n".join(topics[name] for name in sorted(topics))[: tokens * 8]
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    before, after = "", ""
    if trained and tokenizer.chat_template:
        said = [{"role": "user", "content": "\0" + QUESTION}]
        chat = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        before, after = chat.split("\0")
    ids, head, tail = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, before, after)
    )
    text_tokens = tokens - len(head) - len(tail)
    if not ids or text_tokens < 1:
        raise DemoFailed(
            f"the tokenizer of {model} gives {len(ids)} tokens, room is for {text_tokens}"
        )
    return [*head, *(ids * (text_tokens // len(ids) + 1))[:text_tokens], *tail], bool(tail)


def answers_of(model: Path, arms: Iterable[Arm]) -> dict[str, str]:
    """The answer of each arm as text, up to the end-of-sequence token."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    found = {}
    for arm in arms:
        said = tokenizer.decode(arm.typical.output_ids)
        found[arm.mode] = said.partition(tokenizer.eos_token or "\0")[0].strip()
    return found


def _fill(setting: Setting, progress: ProgressLog) -> tuple[Reply, float]:
    """Let a server compute the prompt and store it. What a used store has already is loaded, since
    metrics have the sizes of stored and read blocks alone.

    Returns: its answer; the stored bytes as a share of the bytes of the blocks.
    """
    with _served(setting, "cold", _flags(setting, "load", None), progress) as server:
        reply = generate(server.base_url, setting.prompt, setting.new_tokens)
        progress.say(f"cold: first token after {reply.ttft_s:.2f} s")
        _wait_for_store(server.base_url, setting, progress)
        return reply, _stored_share(server.base_url, setting)


def _arm(setting: Setting, mode: str, bandwidth: float | None, progress: ProgressLog) -> Arm:
    """Start a server in `mode` and run the prompt, each time with an empty tree."""
    arm = Arm(mode, _trace_file(setting, mode))
    with _served(setting, mode, _flags(setting, mode, bandwidth), progress) as server:
        for number in range(setting.repeats):
            flush_cache(server.base_url)
            reply = generate(server.base_url, setting.prompt, setting.new_tokens)
            arm.replies.append(reply)
            progress.say(
                f"{mode}: run {number + 1} of {setting.repeats}, "
                f"first token after {reply.ttft_s:.2f} s"
            )
    return arm


def _trace_file(setting: Setting, name: str) -> Path:
    return setting.out / f"trace-{name}.jsonl"


@contextlib.contextmanager
def _served(
    setting: Setting, name: str, flags: Sequence[str], progress: ProgressLog
) -> Iterator[SglangServer]:
    trace_file = _trace_file(setting, name)
    trace_file.unlink(missing_ok=True)
    server = SglangServer(
        setting.model,
        flags,
        env={TRACE_ENV: str(trace_file)},
        log=setting.out / f"server-{name}.log",
        gpu=setting.gpu,
    )
    progress.say(f"{name}: starting a server (log: {server.log})")
    with server:
        progress.say(f"{name}: healthy after {server.start_s:.1f} s")
        try:
            yield server
        except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
            raise DemoFailed(f"{name}: {error} (the server's log: {server.log})") from None


def _flags(setting: Setting, mode: str, bandwidth: float | None) -> Sequence[str]:
    urls = setting.stores if bandwidth is None else _throttled(setting.stores, bandwidth)
    flags = [
        *("--dtype", setting.dtype, "--chunked-prefill-size", str(CHUNK_TOKENS)),
        *("--enable-cake", "--cake-store", ",".join(urls), "--cake-mode", mode),
        *("--cake-block-tokens", str(BLOCK_TOKENS), "--enable-metrics"),
        *("--cake-codec", setting.codec),
    ]
    if not setting.gpu:
        # KV of two prompts: the default is a share of the machine's whole memory.
        max_tokens = 2 * (len(setting.prompt) + setting.new_tokens)
        flags += ["--mem-fraction-static", "0.3", "--max-total-tokens", str(max_tokens)]
    return flags


def _stored_share(base_url: str, setting: Setting) -> float:
    """Stored bytes, headers included, over the bytes of the blocks."""
    block_bytes = BLOCK_TOKENS * kv_token_bytes(setting.model, setting.dtype)
    blocks = cake_metric(base_url, "encoded_blocks_total")  # counts the payload of each tier
    blocks = blocks or cake_metric(base_url, "stored_blocks_total")
    blocks += cake_metric(base_url, "read_blocks_total")
    stored_bytes = cake_metric(base_url, "stored_bytes_total")
    stored_bytes += cake_metric(base_url, "read_bytes_total")
    return stored_bytes / (blocks * block_bytes) if blocks else 1.0


def _wait_for_store(base_url: str, setting: Setting, progress: ProgressLog) -> None:
    """Wait until every full block of the prompt is stored, or no more blocks are: a store that was
    used before has some of them already."""
    blocks = len(setting.prompt) // BLOCK_TOKENS
    before, changed_s = -1.0, time.monotonic()
    while True:
        stored = cake_metric(base_url, "stored_blocks_total")
        lost = cake_metric(base_url, "unstored_blocks_total")
        if lost:
            raise DemoFailed(f"the store refused {lost:.0f} blocks")
        if stored != before:
            before, changed_s = stored, time.monotonic()
        if stored >= blocks or time.monotonic() - changed_s > STORE_QUIET_S:
            progress.say(f"the store took {stored:.0f} blocks of {blocks}")
            return
        time.sleep(0.5)
