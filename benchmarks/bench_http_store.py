"""Reads over HTTP on loopback: our server beside nginx with the same block files.

    python -m benchmarks.bench_http_store [--small] [--json FILE]

Two clients: `wrk` (Debian's), which throws the bytes away, and ours, which checks every block into
the memory of a caller. All blocks are in the page cache. The servers take turns within a run, and
begin in turns; ratios are of neighbouring runs. Both servers have a worker for each core
(ours at most four), as by default. The client has no core of its own where there are only two.
"""

import argparse
import asyncio
import itertools
import json
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.stats import paired_ratio, spread, whole_numbers
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.namespace import Namespace
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.http.http_client import HttpStore
from sglang_cake.stores.http.http_source import HttpSource
from sglang_cake.stores.http.http_transport import Endpoint
from sglang_cake.stores.http.protocol import block_path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GOAL = 0.8
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
    layout = BlockLayout(1, (("kv", (size_mib * 8192,)),), "uint8", 128)
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
def ours(root: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "sglang_cake", "store", "serve", "--root", str(root)]
    options = ["--port", "0", "--min-free", "0"]
    with running([*command, *options], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Served(process.stdout.readline().split()[-1], process.pid)


@contextmanager
def nginx(root: Path, folder: Path, workers: str) -> Iterator[Served]:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise SystemExit("nginx is needed: apt-get install nginx-light")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, root=root, port=port, workers=workers))
    with running([program, "-p", str(folder), "-c", str(config)]) as process:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield Served(f"http://127.0.0.1:{port}", process.pid)


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
        order = list(servers) if repeat % 2 == 0 else list(servers)[::-1]
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


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each client, size and number of connections."""
    rows = []
    cells = dict.fromkeys((run["client"], run["size_mib"], run["connections"]) for run in runs)
    for client, size_mib, connections in cells:
        cell = [
            run
            for run in runs
            if (run["client"], run["size_mib"], run["connections"])
            == (client, size_mib, connections)
        ]
        of = {name: [run for run in cell if run["server"] == name] for name in ("ours", "nginx")}
        rates = {name: [run["mb_per_s"] for run in mine] for name, mine in of.items()}
        pairs = [[pair] for pair in zip(rates["ours"], rates["nginx"], strict=True)]
        rows.append(
            {
                "client": client,
                "size_mib": size_mib,
                "connections": connections,
                "ours_mb_per_s": spread(rates["ours"], 1),
                "nginx_mb_per_s": spread(rates["nginx"], 1),
                "ours_to_nginx": paired_ratio(pairs),
                **{
                    f"{name}_cpu_s_per_gb": round(
                        statistics.median(run["server_cpu_s_per_gb"] for run in mine), 3
                    )
                    for name, mine in of.items()
                },
            }
        )
    return rows


def table(result: dict[str, Any]) -> str:
    head = ("client", "block", "conns", "ours MB/s", "nginx MB/s", "ratio", "95 %", "CPU s/GB")
    lines = [("{:>10} {:>7} {:>5} {:>10} {:>10} {:>6} {:>13} {:>13}").format(*head)]
    for row in result["summary"]:
        ratio = row["ours_to_nginx"]
        lines.append(
            f"{row['client']:>10} {row['size_mib']:>3} MiB {row['connections']:>5} "
            f"{row['ours_mb_per_s']['median']:>10.0f} {row['nginx_mb_per_s']['median']:>10.0f} "
            f"{ratio['ratio']:>6.2f} {ratio['low']:>6.2f}-{ratio['high']:<6.2f} "
            f"{row['ours_cpu_s_per_gb']:>6.2f}/{row['nginx_cpu_s_per_gb']:<6.2f}"
        )
    rss = result["peak_rss_mb"]
    lines.append(f"largest memory: ours {rss['ours']} MB, nginx {rss['nginx']} MB (all workers)")
    least = min(row["ours_to_nginx"]["ratio"] for row in result["summary"])
    verdict = "reached" if least >= GOAL else "missed"
    lines.append(f"goal, {GOAL:.0%} of nginx in every row: {verdict} (least {least:.0%})")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_http_store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--small", action="store_true", help="one size, seconds instead of minutes")
    add("--sizes", type=whole_numbers, default=[1, 4, 16], help="MiB of a block, as 1,4,16")
    add("--connections", type=whole_numbers, default=[1, 4, 16])
    add("--seconds", type=int, default=3, help="of one run")
    add("--repeats", type=int, default=5)
    add("--blocks", type=int, default=8, help="blocks of each size")
    add("--nginx-workers", default="auto", help="auto (as by default): one a core")
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
        nginx_workers=args.nginx_workers,
        clients=args.clients,
    )
    with tempfile.TemporaryDirectory() as work:
        folder, root = Path(work), Path(work) / "root"
        all_blocks = {size: fill(root, size, args.blocks) for size in args.sizes}
        with ours(root) as our, nginx(root, folder, args.nginx_workers) as other:
            servers = {"ours": our, "nginx": other}
            for served in servers.values():  # all is in the page cache then
                for blocks in all_blocks.values():
                    by_our_client(served, blocks, 1, 1)
            runs = measure(args, servers, all_blocks)
            result["peak_rss_mb"] = {name: one.peak_rss_mb() for name, one in servers.items()}
    result["machine"]["load_average_after"] = facts.machine()["load_average"]
    result |= {"summary": summarise(runs), "runs": runs}
    if args.json:
        facts.write(args.json, result)
    print(table(result))
    print(json.dumps(result["summary"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
