"""Reads over HTTP on loopback: the package's server beside others with the same block files.

    python -m benchmarks.bench_http_store [--small] [--servers ours,nginx] [--json FILE]

Servers: `ours` (`sglang-cake store serve`), `nginx`, and the least that a server on aiohttp has to
do (`http_arms`) under gunicorn, with asyncio (`aiohttp`) and with uvloop (`uvloop`). All have the
same number of workers.

Clients: `wrk` (Debian's), which throws the bytes away, and ours, which checks every block into
the memory of a caller. All blocks are in the page cache. The servers take turns within a repeat,
each time in another order; ratios are of runs of the same repeat. The client has no core of its own
where there are only two.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import facts, http_arms
from benchmarks.command_line import parser_of
from benchmarks.stats import paired_ratio, spread, whole_numbers
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.keys import BlockKey, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.demo.sglang_server import free_port
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.http.http_store import HttpSource, HttpStore
from sglang_cake.stores.http.http_transport import Endpoint
from sglang_cake.stores.http.protocol import block_path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GOAL = 0.8
BASES = ("ours", "nginx")  # the servers that ratios refer to
NGINX = """
daemon off; worker_processes {workers}; user root;
pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000000;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""
WRK = """
local paths, at = {{ {paths} }}, 0
wrk.headers["Authorization"] = "Bearer {token}"
request = function() at = at % #paths + 1; return wrk.format("GET", paths[at]) end
done = function(summary)
    local e = summary.errors
    print(string.format("RESULT %d %d %d %d", summary.bytes, summary.duration, summary.requests,
        e.connect + e.read + e.write + e.status + e.timeout))
end
"""


@dataclass(frozen=True)
class Blocks:
    """Stored blocks of one size."""

    frame: BlockFrame
    keys: list[BlockKey]

    @property
    def paths(self) -> list[str]:
        return [block_path(self.frame.digest, key) for key in self.keys]


@dataclass(frozen=True)
class Served:
    """A server that runs; its processes are `pid` and what it started."""

    base: str
    pid: int

    def pids(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [self.pid, *map(int, children.split())]

    def cpu_s(self) -> float:
        """Time on a processor so far, of user and system."""
        ticks = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS_PER_S

    def peak_rss_mb(self) -> float:
        """The largest resident sets, summed over the processes. Shared pages count each time."""
        total_kb = 0
        for pid in self.pids():
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total_kb += next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return round(total_kb / 1e3, 1)


def fill(root: Path, size_mib: int, count: int) -> Blocks:
    """Store `count` blocks of `size_mib` each."""
    layout = BlockLayout.plain(1, (("kv", (size_mib * 8192,)),), "uint8", 128)
    frame = BlockFrame(Namespace((("size", f"{size_mib} MiB"),)), layout)
    keys = [BlockKey(os.urandom(32)) for _ in range(count)]

    async def put_all() -> None:
        store = FileSource(root, min_free_bytes=0).open(frame, depth=1)
        for key in keys:
            assert await store.put(key, memoryview(os.urandom(layout.block_bytes)))
        await store.close()

    asyncio.run(put_all())
    return Blocks(frame, keys)


@contextmanager
def running(command: list[str], **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, text=True, cwd=facts.ROOT, **kwargs)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextmanager
def ours(root: Path, workers: int | None = None) -> Iterator[Served]:
    command = [sys.executable, "-m", "sglang_cake", "store", "serve", "--root", str(root)]
    options = ["--port", "0", "--min-free", "0"]
    if workers is not None:
        options += ["--workers", str(workers)]
    with running([*command, *options], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Served(process.stdout.readline().split()[-1], process.pid)


@contextmanager
def nginx(root: Path, workers: int) -> Iterator[Served]:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise SystemExit("nginx is needed: apt-get install nginx-light")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, root=root, port=port, workers=workers))
        with running([program, "-p", folder, "-c", str(config)]) as process:
            wait_for(port)
            yield Served(f"http://127.0.0.1:{port}", process.pid)


@contextmanager
def gunicorn(root: Path, workers: int, worker_class: str) -> Iterator[Served]:
    """The application of `http_arms`."""
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "benchmarks.http_arms:application"]
    command += ["--worker-class", f"aiohttp.{worker_class}", "--workers", str(workers)]
    command += ["--bind", f"127.0.0.1:{port}", "--keep-alive", "75", "--log-level", "warning"]
    command += ["--graceful-timeout", "5", "--no-control-socket"]
    environment = os.environ | {http_arms.ROOT_VARIABLE: str(root)}
    with running(command, env=environment) as process:
        wait_for(port)
        yield Served(f"http://127.0.0.1:{port}", process.pid)


def wait_for(port: int) -> None:
    """Until a server listens on loopback, for a minute."""
    for _ in range(1200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"no server listens on port {port}")


SERVERS = {
    "ours": ours,
    "nginx": nginx,
    "aiohttp": lambda root, workers: gunicorn(root, workers, "GunicornWebWorker"),
    "uvloop": lambda root, workers: gunicorn(root, workers, "GunicornUVLoopWebWorker"),
}


def endpoint(served: Served) -> Endpoint:
    """With the token that our server made; nginx asks for none."""
    return HttpSource(served.base).locate()


def by_wrk(served: Served, blocks: Blocks, connections: int, seconds: int) -> dict[str, float]:
    """Read blocks for `seconds`; bytes, requests and seconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        paths = ", ".join(f'"{path}"' for path in blocks.paths)
        script.write(WRK.format(paths=paths, token=endpoint(served).token))
        script.flush()
        options = ["-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s"]
        command = ["wrk", *options, "-s", script.name, served.base]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in said.splitlines() if line.startswith("RESULT "))
    moved, took_us, requests, errors = map(int, line.split()[1:])
    if errors:
        raise SystemExit(f"wrk counted {errors} errors against {served.base}:\n{said}")
    return {"bytes": moved, "requests": requests, "took_s": took_us / 1e6}


def by_our_client(
    served: Served, blocks: Blocks, connections: int, seconds: int
) -> dict[str, float]:
    """The same with `HttpStore`, which checks every block."""

    async def read_all() -> tuple[int, float]:
        store = HttpStore(lambda: endpoint(served), blocks.frame, depth=connections)
        until_s = time.perf_counter() + seconds

        async def read(at: int) -> int:
            out, count = memoryview(bytearray(blocks.frame.payload_bytes)), 0
            while time.perf_counter() < until_s:
                await store.get_into(blocks.keys[(at + count) % len(blocks.keys)], out)
                count += 1
            return count

        started_s = time.perf_counter()
        counts = await asyncio.gather(*(read(at) for at in range(connections)))
        took_s = time.perf_counter() - started_s
        await store.close()
        return sum(counts), took_s

    requests, took_s = asyncio.run(read_all())
    return {
        "bytes": requests * blocks.frame.framed_bytes,
        "requests": requests,
        "took_s": took_s,
    }


CLIENTS = {"wrk": by_wrk, "HttpStore": by_our_client}


def measure(
    args: argparse.Namespace, servers: dict[str, Served], all_blocks: dict[int, Blocks]
) -> list[dict[str, Any]]:
    """Every single run, in the order in which they were made."""
    runs: list[dict[str, Any]] = []
    cells = list(itertools.product(args.clients, all_blocks, args.connections))
    for repeat in range(args.repeats):
        order = in_turn(list(servers), repeat)
        for (client, size_mib, connections), name in itertools.product(cells, order):
            before_s = servers[name].cpu_s()
            run = CLIENTS[client](servers[name], all_blocks[size_mib], connections, args.seconds)
            cpu_s = servers[name].cpu_s() - before_s
            runs.append(
                {
                    "repeat": repeat,
                    "client": client,
                    "size_mib": size_mib,
                    "connections": connections,
                    "server": name,
                    "mb_per_s": round(run["bytes"] / run["took_s"] / 1e6, 1),
                    "requests_per_s": round(run["requests"] / run["took_s"], 1),
                    "server_cpu_s_per_gb": round(cpu_s / run["bytes"] * 1e9, 4),
                }
            )
        print(f"repeat {repeat + 1} of {args.repeats} done", file=sys.stderr)
    return runs


def in_turn(names: list[str], repeat: int) -> list[str]:
    """The order within a repeat: each server is first, last and between the others by turns."""
    first = repeat // 2 % len(names)
    order = names[first:] + names[:first]
    return order if repeat % 2 == 0 else order[::-1]


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each client, size and number of connections, then a mean row for each client.

    A ratio is the median over the repeats; in the row of a client, of the geometric means over its
    cells.
    """
    servers = list(dict.fromkeys(run["server"] for run in runs))
    cells = list(
        dict.fromkeys((run["client"], run["size_mib"], run["connections"]) for run in runs)
    )
    rates: dict[tuple[Any, str], list[float]] = {}
    cpu: dict[tuple[Any, str], list[float]] = {}
    for run in sorted(runs, key=lambda run: run["repeat"]):
        at = (run["client"], run["size_mib"], run["connections"]), run["server"]
        rates.setdefault(at, []).append(run["mb_per_s"])
        cpu.setdefault(at, []).append(run["server_cpu_s_per_gb"])

    def ratios(some: list[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for base in (name for name in BASES if name in servers):
            found[f"to_{base}"] = {
                name: paired_ratio([[pair] for pair in zip(*means(some, name, base), strict=True)])
                for name in servers
                if name != base
            }
        return found

    def means(some: list[Any], *names: str) -> Iterator[list[float]]:
        for name in names:
            by_repeat = zip(*(rates[cell, name] for cell in some), strict=True)
            yield [math.exp(statistics.fmean(map(math.log, values))) for values in by_repeat]

    rows = [
        {
            "client": cell[0],
            "size_mib": cell[1],
            "connections": cell[2],
            "mb_per_s": {name: spread(rates[cell, name], 1) for name in servers},
            "cpu_s_per_gb": {
                name: round(statistics.median(cpu[cell, name]), 3) for name in servers
            },
            **ratios([cell]),
        }
        for cell in cells
    ]
    for client in dict.fromkeys(cell[0] for cell in cells):
        own = [cell for cell in cells if cell[0] == client]
        rows.append({"client": client, "size_mib": None, "connections": None, **ratios(own)})
    return rows


def table(result: dict[str, Any]) -> str:
    summary = result["summary"]
    cells = [row for row in summary if row["size_mib"] is not None]
    servers = list(cells[0]["mb_per_s"])
    head = "{:>10} {:>7} {:>5}".format("client", "block", "conns")
    lines = ["MB/s (CPU s/GB of the server)", head + "".join(f" {name:>15}" for name in servers)]
    for row in cells:
        values = [
            f" {row['mb_per_s'][name]['median']:>8.0f} ({row['cpu_s_per_gb'][name]:.2f})"
            for name in servers
        ]
        lines.append(_cell(row) + "".join(f"{value:>16}" for value in values))
    for base in (name for name in BASES if name in servers):
        others = [name for name in servers if name != base]
        lines += ["", f"ratio of MB/s to {base} (95 %)"]
        lines.append(head + "".join(f" {name:>19}" for name in others))
        for row in summary:
            found = [row[f"to_{base}"][name] for name in others]
            lines.append(
                _cell(row)
                + "".join(f" {r['ratio']:>6.2f} ({r['low']:.2f}-{r['high']:.2f})" for r in found)
            )
    memory = ", ".join(f"{name} {rss} MB" for name, rss in result["peak_rss_mb"].items())
    lines += ["", f"largest memory, all processes: {memory}"]
    if "ours" in servers and "nginx" in servers:
        least = min(row["to_nginx"]["ours"]["ratio"] for row in cells)
        verdict = "reached" if least >= GOAL else "missed"
        lines.append(f"goal, {GOAL:.0%} of nginx in every row: {verdict} (least {least:.0%})")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if row["size_mib"] is None:
        return f"{row['client']:>10} {'mean':>7} {'':>5}"
    return f"{row['client']:>10} {row['size_mib']:>3} MiB {row['connections']:>5}"


def server_names(text: str) -> list[str]:
    """`ours,nginx` as names of SERVERS. Raises: ValueError."""
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= set(SERVERS):
        raise ValueError(f"{text!r} names other servers than {','.join(SERVERS)}")
    return names


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench_http_store", __doc__)
    add = parser.add_argument
    add("--small", action="store_true", help="one size, seconds instead of minutes")
    add("--sizes", type=whole_numbers, default=[1, 4, 16], help="MiB of a block, as 1,4,16")
    add("--connections", type=whole_numbers, default=[1, 4])
    add("--seconds", type=int, default=2, help="of one run")
    add("--repeats", type=int, default=6)
    add("--blocks", type=int, default=8, help="blocks of each size")
    add("--servers", type=server_names, default=list(SERVERS), help=",".join(SERVERS))
    add("--workers", type=int, default=min(4, len(os.sched_getaffinity(0))), help="of each server")
    add("--json", type=Path, help="write the result here")
    args = parser.parse_args(argv)
    if args.small:
        args.sizes, args.connections, args.seconds, args.repeats = [4], [4], 1, 3
    args.clients = [client for client in CLIENTS if client != "wrk" or shutil.which("wrk")]
    if "wrk" not in args.clients:
        print("wrk is not installed: only our own client is measured", file=sys.stderr)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    result = facts.header(
        "http-store",
        sizes_mib=args.sizes,
        connections=args.connections,
        seconds=args.seconds,
        repeats=args.repeats,
        blocks=args.blocks,
        servers=args.servers,
        workers=args.workers,
        clients=args.clients,
    )
    if not {"aiohttp", "uvloop"}.isdisjoint(args.servers):
        result["versions"] |= {name: version(name) for name in ("aiohttp", "gunicorn", "uvloop")}
    with tempfile.TemporaryDirectory() as work, ExitStack() as running_servers:
        root = Path(work)
        all_blocks = {size: fill(root, size, args.blocks) for size in args.sizes}
        servers = {
            name: running_servers.enter_context(SERVERS[name](root, args.workers))
            for name in args.servers
        }
        for served in servers.values():  # all is in the page cache then
            for blocks in all_blocks.values():
                by_our_client(served, blocks, 1, 1)
        runs = measure(args, servers, all_blocks)
        result["peak_rss_mb"] = {name: one.peak_rss_mb() for name, one in servers.items()}
    result |= {"summary": summarise(runs), "runs": runs}
    if args.json:
        facts.finish(args.json, result)
    print(table(result))
    print(json.dumps(result["summary"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
