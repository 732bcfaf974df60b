"""Every kind of store on this machine: reads and writes beside the network's limit, and the demo.

    python -m benchmarks.bench_stores [--small] [--demo] [--out FILE]

Each store is what a user would start: a folder (`file`), `sglang-cake store serve` (`http`), moto
(`s3`), a Mooncake master with a client that lends 2 GB (`mooncake`), and, for the demo alone, a
folder in front of an HTTP server (`tiers`). `sglang-cake store bench` measures each from outside;
the stores take turns within a round. `loopback` is the physical limit of those that are behind a
socket: two processes that do nothing but send blocks of the same sizes, one connection for each
read in flight. A folder has its own benchmark (`bench_file_store`, beside fio), and so has the HTTP
server (`bench_http_store`, beside nginx). moto is no storage service: it shows that the protocol
works and what our side of it costs at least.

`--demo` runs `sglang-cake demo` on every store as well: the same tokens, and how long they took.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.bench_http_store import ours, running, wait_for
from benchmarks.command_line import fill, parser_of
from benchmarks.demos import ARMS, CAKE, demo, said
from benchmarks.stats import spread
from sglang_cake.cli.text_tables import table
from sglang_cake.demo.sglang_server import free_port

FULL = {"sizes": [1, 4], "depths": [1, 8], "mib": 256, "repeats": 3, "name": "cpu"}
SMALL = {"sizes": [1], "depths": [4], "mib": 8, "repeats": 1, "name": "small"}
KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "else"}
BUCKET = "cake-bench"
CALLS = ("read", "write")
LOOPBACK = "loopback"


@contextlib.contextmanager
def file_store(folder: Path) -> Iterator[str]:
    (folder / "file").mkdir(parents=True)
    yield f"{(folder / 'file').as_uri()}?min_free=0"


@contextlib.contextmanager
def http_store(folder: Path) -> Iterator[str]:
    with ours(folder / "http") as served:
        yield served.base


@contextlib.contextmanager
def s3_store(folder: Path) -> Iterator[str]:
    import botocore.session

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        wait_for(port)
        endpoint = f"http://127.0.0.1:{port}"
        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}/bench?endpoint={endpoint}&region=us-east-1"


@contextlib.contextmanager
def mooncake_store(folder: Path) -> Iterator[str]:
    master, metrics, client = (free_port() for _ in range(3))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    programs = Path(sys.executable).parent
    lend = [f"--master_server_address=127.0.0.1:{master}", "--metadata_server=P2PHANDSHAKE"]
    lend += ["--host=127.0.0.1", f"--port={client}", "--global_segment_size=2GB"]
    listen = ["--rpc_address=127.0.0.1", f"--rpc_port={master}"]
    listen += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
    with running([str(programs / "mooncake_master"), *listen], **quiet):
        wait_for(master)
        with running([str(programs / "mooncake_client"), *lend], **quiet):
            wait_for(client)
            yield f"mooncake://127.0.0.1:{master}?segment=0"


@contextlib.contextmanager
def tiers(folder: Path) -> Iterator[str]:
    with file_store(folder / "tiers") as near, http_store(folder / "tiers") as far:
        yield f"{near},{far}"


STORES: dict[str, Callable[[Path], contextlib.AbstractContextManager[str]]] = {
    "file": file_store,
    "http": http_store,
    "s3": s3_store,
    "mooncake": mooncake_store,
    "tiers": tiers,
}


def by_tool(url: str, args: argparse.Namespace) -> dict[tuple[int, int, str], float]:
    """Bytes per second by (MiB, depth, call), measured by `sglang-cake store bench`."""
    command = [*CAKE, "store", "bench", url, "--json", "--bytes", f"{args.mib}MiB"]
    command += ["--sizes", ",".join(f"{mib}MiB" for mib in args.sizes)]
    command += ["--depths", ",".join(map(str, args.depths))]
    return {
        (run["block_bytes"] >> 20, run["depth"], call): run[f"{call}_bytes_per_s"]
        for run in json.loads(said(command, KEYS))["runs"]
        for call in CALLS
    }


def loopback(mib: int, depth: int, total_mib: int) -> float:
    """Bytes per second between two processes that only send and receive blocks."""
    size, count = mib << 20, max(1, total_mib // mib // depth)
    listening = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        _send(listening, size, count, depth)  # never returns
    started_s = time.perf_counter()
    threads = [
        threading.Thread(target=_receive, args=(listening.getsockname(), size * count))
        for _ in range(depth)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - started_s
    os.waitpid(pid, 0)
    listening.close()
    return size * count * depth / took_s


def _send(listening: socket.socket, size: int, count: int, depth: int) -> None:
    block = bytes(size)

    def send(connection: socket.socket) -> None:
        for _ in range(count):
            connection.sendall(block)
        connection.close()

    threads = [threading.Thread(target=send, args=(listening.accept()[0],)) for _ in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def _receive(address: tuple[str, int], total_bytes: int) -> None:
    with socket.create_connection(address) as connection:
        into, left = memoryview(bytearray(1 << 20)), total_bytes
        while left:
            left -= connection.recv_into(into[: min(left, len(into))])


def measure(urls: dict[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every single run, store after store within a round."""
    runs = []
    for repeat in range(args.repeats):
        names = list(urls) if repeat % 2 == 0 else list(urls)[::-1]
        found = {name: by_tool(urls[name], args) for name in names}
        for mib in args.sizes:
            for depth in args.depths:
                limit = loopback(mib, depth, args.mib)
                cell = {"repeat": repeat, "block_mib": mib, "depth": depth}
                runs.append({**cell, "store": LOOPBACK, "read": limit, "write": limit})
                for name, rates in found.items():
                    both = {call: rates[mib, depth, call] for call in CALLS}
                    runs.append({**cell, "store": name, **both})
        print(f"round {repeat + 1} of {args.repeats} done", file=sys.stderr)
    return runs


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """GB/s by store, block and depth, and the share of the loopback of the same round."""
    rows = []
    for key in dict.fromkeys((run["store"], run["block_mib"], run["depth"]) for run in runs):
        store, mib, depth = key
        here = [r for r in runs if (r["store"], r["block_mib"], r["depth"]) == key]
        limit = {
            r["repeat"]: r["read"]
            for r in runs
            if (r["store"], r["block_mib"], r["depth"]) == (LOOPBACK, mib, depth)
        }
        row: dict[str, Any] = {"store": store, "block_mib": mib, "depth": depth}
        for call in CALLS:
            row[f"{call}_gb_per_s"] = spread([run[call] / 1e9 for run in here], 3)
        shares = [run["read"] / limit[run["repeat"]] for run in here]
        row["read_to_loopback"] = None if store in (LOOPBACK, "file") else spread(shares, 3)
        rows.append(row)
    return sorted(rows, key=lambda row: (row["block_mib"], row["depth"]))


def demos(urls: dict[str, str]) -> list[dict[str, Any]]:
    """`sglang-cake demo` on every store: seconds to the first token, and whether tokens agree."""
    rows = []
    for name, url in urls.items():
        print(f"demo on {name}", file=sys.stderr)
        found = demo("--store", url, env=KEYS)
        rows.append({"store": name, "ttft_s": found["ttft_s"], "same_tokens": found["same_tokens"]})
    return rows


def text(result: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        [
            row["store"],
            f"{row['block_mib']} MiB",
            str(row["depth"]),
            *(f"{row[f'{call}_gb_per_s']['median']:.2f}" for call in CALLS),
            f"{row['read_to_loopback']['median']:.2f}" if row["read_to_loopback"] else "-",
        ]
        for row in result["summary"]
    ]
    heads = ["store", "block", "in flight", "read GB/s", "write GB/s", "read / loopback"]
    parts = [table(heads, lines, right=range(1, len(heads)))]
    if result["demos"]:
        lines = [
            [
                row["store"],
                *(f"{row['ttft_s'][arm]:.2f}" for arm in ARMS),
                "yes" if row["same_tokens"] else "NO",
            ]
            for row in result["demos"]
        ]
        heads = ["demo on", "compute s", "load s", "both s", "same tokens"]
        parts.append(table(heads, lines, right=range(1, 4)))
    return "\n\n".join(parts)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench_stores", __doc__)
    parser.add_argument("--small", action="store_true", help="little and few: shows that it works")
    parser.add_argument("--stores", default=",".join(STORES), help="which (default: all)")
    parser.add_argument("--demo", action="store_true", help="run the demo on each as well")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    args.stores = args.stores.split(",")
    if not set(args.stores) <= set(STORES):
        parser.error(f"--stores takes {', '.join(STORES)}")
    args.out = args.out or facts.RESULTS / f"stores-{args.name}.json"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    settings = {name: getattr(args, name) for name in ("sizes", "depths", "mib", "repeats")}
    result = facts.header("stores", **settings)
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(STORES[name](Path(work))) for name in args.stores}
        runs = measure({name: url for name, url in urls.items() if name != "tiers"}, args)
        found = demos(urls) if args.demo else []
    rounded = [{**run, **{call: round(run[call]) for call in CALLS}} for run in runs]
    result |= {"summary": summary(runs), "demos": found, "runs": rounded}
    facts.write(args.out, result)
    print(text(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
