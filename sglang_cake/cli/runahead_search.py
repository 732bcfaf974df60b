"""`sglang-cake runahead search`: the best partition of long prompts, measured on running servers.

The command sends prompts of these lengths to one member of a group (`--cake-runahead-rank`), with
different partitions. It writes the best one into the lookup table of that machine and namespace.
The server reads the table without a restart, and interpolates between lengths (docs/runahead.md).

    sglang-cake runahead search --url http://127.0.0.1:30000 --lengths 4k,8k --workers 2

Every measurement is written to disk at once, so a stopped search can be resumed. The servers should
have no other requests meanwhile. Run the command on the machine of the server that it asks, with
the same XDG_CACHE_HOME or HOME.
"""

import argparse
import contextlib
import json
import math
import random
import re
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_cake.cli.text_tables import table
from sglang_cake.core import untrusted
from sglang_cake.core.errors import ConfigError, RunaheadError
from sglang_cake.core.keys import Span
from sglang_cake.core.local_files import cache_folder
from sglang_cake.runahead.chain_plan import ChainLimits
from sglang_cake.runahead.grid_search import Searched, grid_search
from sglang_cake.runahead.partition import PARAMETER, Partition, even
from sglang_cake.runahead.partition_table import load_table, save_table

TRIES = 40  # a busy member refuses
PAUSE_S = 0.25
NEW_TOKENS = 1
MOST_PARTITIONS = 1000  # in a level; it takes hours
_FILE_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}\.json")
_TOKEN_VALUES = 256  # every tokenizer has at least so many tokens

# `(prompt length, ends of the spans or "closed") -> (TTFT in seconds, meta_info.cake)`.
Ask = Callable[[int, object], tuple[float, dict[str, Any]]]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("runahead", help="several workers share a prompt: search")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    search = actions.add_parser(
        "search",
        help="measure partitions on running servers, and keep the best",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    search.add_argument("--url", default="http://127.0.0.1:30000", help="of one member")
    search.add_argument("--lengths", default="4k,8k", metavar="N[,N...]", help="in tokens")
    search.add_argument("--workers", type=int, default=2, metavar="P", help="that share a prompt")
    search.add_argument("--repeats", type=int, default=3, metavar="N", help="median of N runs")
    search.add_argument("--points", type=int, default=3, metavar="N", help="of a bound in a level")
    search.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search every length. Raises: ConfigError, RunaheadError; measurements are kept."""
    from sglang_cake.cli.machine_args import parse_lengths

    lengths = sorted(set(parse_lengths(args.lengths, "--lengths")))
    if args.workers < 2 or args.repeats < 1 or args.points < 3 or args.points % 2 == 0:
        raise ConfigError("runahead search needs 2 workers or more, a repeat, and 3, 5, ... points")
    if (args.workers - 1) * math.log(args.points) > math.log(MOST_PARTITIONS):
        raise ConfigError(
            f"--workers {args.workers} with --points {args.points}: a level of the search has "
            f"points^(workers - 1) partitions, and {MOST_PARTITIONS:,} are possible: lower them"
        )
    url = args.url.rstrip("/")
    limits = _limits(url)
    least, most = 4 * args.workers * limits.page_tokens, args.workers * limits.step_tokens
    if min(lengths) < least or max(lengths) > most:
        raise ConfigError(f"--lengths: {least} to {most} tokens here, for {args.workers} workers")
    found = []
    for tokens in lengths:
        found.append(
            search_one(
                lambda n, ends: _ask(url, n, ends),
                tokens,
                args.workers,
                limits=limits,
                repeats=args.repeats,
                points=args.points,
                say=lambda text: print(text, flush=True),
            )
        )
    rows = [
        [
            f"{each.partition.bounds[-1]:,}",
            " ".join(f"{share:.3f}" for share in each.partition.fractions),
            f"{each.ttft_s:.3f}",
            str(each.measured),
        ]
        for each in found
    ]
    print("\n" + table(["tokens", "shares", "TTFT s", "measured"], rows, right=(0, 2, 3)))
    return 0


def search_one(
    ask: Ask,
    tokens: int,
    workers: int,
    *,
    limits: ChainLimits,
    repeats: int,
    points: int,
    say: Callable[[str], None],
) -> Searched:
    """Find the best partition of prompts of `tokens` tokens, and write it into the server's table.

    Raises: RunaheadError if the other members do not help.
    """
    page_tokens = limits.page_tokens
    start = even(Span(0, tokens), workers, page_tokens=page_tokens)
    _, first = helped(ask, tokens, start)
    path = _table_of(first)
    journal = path.with_name(f"{path.stem}.search-{tokens}-{workers}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = dict(_read(journal))

    def measure(partitions: Sequence[Partition]) -> list[float]:
        for each in partitions:
            if each.bounds not in known:
                times = [helped(ask, tokens, each)[0] for _ in range(repeats)]
                ttft_s = known[each.bounds] = statistics.median(times)
                _append(journal, each.bounds, ttft_s)
                say(
                    f"{tokens:,} tokens  {each.bounds}  {ttft_s:.3f} s  "
                    f"best {min(known.values()):.3f} s  #{len(known)}"
                )
        return [known[each.bounds] for each in partitions]

    closed = ask(tokens, "closed")[1].get("bounds")
    if isinstance(closed, list) and len(closed) == workers + 1 and closed[-1] == tokens:
        start = Partition(tuple(closed))
    found = grid_search(
        start,
        measure,
        stride_tokens=max(page_tokens, tokens // (8 * workers)),
        min_stride_tokens=max(page_tokens, tokens // 128),
        page_tokens=page_tokens,
        points=points,
        step_tokens=limits.step_tokens,
    )
    searched = load_table(path)
    searched.put(tokens, found.partition)
    save_table(path, searched)
    journal.unlink(missing_ok=True)
    return found


# A line of the journal, by which a search that was stopped goes on: bounds and their TTFT.
_JOURNAL_LINE = msgspec.json.Decoder(tuple[tuple[int, ...], float])


def _append(journal: Path, bounds: tuple[int, ...], ttft_s: float) -> None:
    journal.touch(mode=0o600, exist_ok=True)
    with journal.open("ab") as file:
        # The newline first: it ends a line that a crash left.
        file.write(b"\n" + msgspec.json.encode((bounds, ttft_s)))


def _read(journal: Path) -> Iterator[tuple[tuple[int, ...], float]]:
    for line in journal.read_bytes().splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError):  # a line that a crash left: it is measured again
            yield untrusted.decode(_JOURNAL_LINE, line)


def helped(ask: Ask, tokens: int, partition: Partition) -> tuple[float, dict[str, Any]]:
    """Run a prompt until the other members help. Raises: RunaheadError if they never do."""
    for _ in range(TRIES):
        ttft_s, meta_info = ask(tokens, list(partition.bounds[1:]))
        if meta_info.get("bounds") == list(partition.bounds):
            return ttft_s, meta_info
        time.sleep(PAUSE_S)
    raise RunaheadError(
        f"no member helps with {partition.bounds}: are all up, idle, and with KV memory for their "
        "spans? Their logs say 'cake runahead: member N is here', and why a request was computed "
        "alone"
    )


def _table_of(meta_info: dict[str, Any]) -> Path:
    name = meta_info.get("table")
    try:
        folder = cache_folder()
    except RuntimeError:
        name = None
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise RunaheadError("no folder for the table: set XDG_CACHE_HOME or HOME, also for servers")
    return folder / "runahead" / name


def _ask(url: str, tokens: int, ends: object) -> tuple[float, dict[str, Any]]:
    from sglang_cake.demo.sglang_server import generate

    # New text every time, so that no part of it is cached.
    prompt = random.Random().choices(range(_TOKEN_VALUES), k=tokens)
    try:
        reply = generate(url, prompt, NEW_TOKENS, custom_params={PARAMETER: ends})
    except (OSError, RuntimeError, ValueError) as error:
        raise RunaheadError(f"{url} does not answer: {error}") from None
    return reply.ttft_s, reply.cake


def _limits(url: str) -> ChainLimits:
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=30) as reply:
            found = json.loads(reply.read())
            step_tokens = int(found["chunked_prefill_size"])
            if step_tokens <= 0:  # without chunks
                step_tokens = int(found["max_prefill_tokens"])
            return ChainLimits(int(found["page_size"]), step_tokens)
    except Exception as error:  # any server may answer, with anything
        raise ConfigError(f"--url {url}: no SGLang server answers there ({error})") from None
