"""A Mooncake master in a process of its own, and `python mooncake_process.py URL`: a client.

The client opens our store and does what its standard input says, one line in, one out:
`put N` (blocks 0 to N-1), `read N` (how each ended) or `end`.
"""

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys

from polling import until

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import StoreError
from sglang_cake.core.layout import BlockLayout
from sglang_cake.demo.sglang_server import free_port
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.store_contract import NAMESPACE, block_of, key_of, read

CLIENT_TTL_S = 30  # how long the master believes in a client that is dead, or just busy
LAYOUT = BlockLayout.plain(layers=1, parts=(("kv", (1024,)),), dtype="float32", block_tokens=64)
FRAME = BlockFrame(NAMESPACE, LAYOUT)  # 256 KiB


def free_ports(count):
    return [free_port() for _ in range(count)]


class Master:
    """Forgets everything when it is started again."""

    def __init__(self, ports, client_ttl_s=CLIENT_TTL_S):
        self.ports = ports
        command = [sys.executable, "-m", "mooncake.cli", "--rpc_address=127.0.0.1"]
        command += ["--metrics_host=127.0.0.1", f"--client_ttl={client_ttl_s}"]
        command += [f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(self._answers, "the master answers")

    def _answers(self):
        assert self.process.poll() is None, "the master ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.ports[0])) == 0

    def url(self, segment="64MB"):
        return f"mooncake://127.0.0.1:{self.ports[0]}?segment={segment}"

    def open(self, frame, *, segment="64MB", depth=4, options="", **changed):
        """Args: changed: fields of the source."""
        (source,) = parse_sources(self.url(segment) + options)
        return dataclasses.replace(source, **changed).open(frame, depth=depth)

    def kill(self):
        self.process.kill()
        self.process.wait()


class Client:
    """A process with a store of its own."""

    def __init__(self, master, segment="64MB"):
        self.process = subprocess.Popen(
            [sys.executable, __file__, master.url(segment)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


async def how_it_ends(store, key, data):
    """How a read ends: `right`, `WRONG`, or the name of the error."""
    try:
        return "right" if await read(store, key, LAYOUT) == data else "WRONG"
    except StoreError as error:
        return type(error).__name__


async def serve(url):
    (source,) = parse_sources(url)
    # To join and to put on a busy machine. Reads keep their limit: their peer may be dead.
    store = dataclasses.replace(source, patience_s=60.0).open(FRAME, depth=4)
    store.reads.patience_s = source.patience_s
    while (line := await asyncio.to_thread(sys.stdin.readline)) not in ("", "end\n"):
        verb, count = line.split()
        answers = []
        for name in range(int(count)):
            key, data = key_of(name), block_of(name, LAYOUT)
            if verb == "put":
                answers.append(str(await store.put(key, data)))
            else:
                answers.append(await how_it_ends(store, key, data))
        print(*answers, flush=True)
    await store.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
