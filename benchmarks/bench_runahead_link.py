"""How fast KV goes from one KV-Runahead member to another, beside CurveZMQ and a plain socket.

    python -m benchmarks runahead_link [--mib 1024] [--repeats 7]

Two processes on loopback, parts of 4 MiB. Arms take turns, round by round, and their order turns:

    member  `send_part` of the transport: sealed by AES-256-GCM, over a ZeroMQ socket in the clear
    curve   the same parts over a CurveZMQ socket, which encrypts them by itself
    socket  a plain socket, nothing encrypted or checked: the limit

Rates are GB/s (10^9 bytes), from the first part that came to the last; processor time is that of
both processes, seconds per GB. Ratios are of the same round.
"""

import argparse
import multiprocessing
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from benchmarks.facts import RESULTS, finish, header
from benchmarks.stats import spread
from sglang_cake.core.keys import Digest
from sglang_cake.demo.sglang_server import free_port
from sglang_cake.runahead.messages import MAX_PART_BYTES, LayerPart, Message
from sglang_cake.runahead.zeromq import Curve, ZmqTransport

SECRET, NAMESPACE = bytes(range(32)), Digest(bytes(32))
WAIT_S = 60.0
Address = tuple[str, int]


class Clock:
    """From the first part to the last: wall time and processor time of this process."""

    def __init__(self) -> None:
        self.count = 0
        self.came = threading.Condition()
        self.began = self.ended = (0.0, 0.0)

    def part(self) -> None:
        with self.came:
            self.ended = (time.perf_counter(), time.process_time())
            if not self.count:
                self.began = self.ended
            self.count += 1
            self.came.notify_all()

    def wait(self, parts: int) -> tuple[float, float]:
        """Seconds of both, once that many have come."""
        with self.came:
            assert self.came.wait_for(lambda: self.count == parts, WAIT_S)
        return self.ended[0] - self.began[0], self.ended[1] - self.began[1]


class Counting(Clock):
    """A member's handler."""

    def on_message(self, rank: int, message: Message) -> None:
        pass

    def on_part(self, rank: int, part: LayerPart, payload: memoryview) -> None:
        self.part()

    def on_gone(self, rank: int, reason: str) -> None:
        pass


def _member(rank: int, peers: list[Address], handler: Counting) -> ZmqTransport:
    made = ZmqTransport(rank, peers, secret=SECRET, namespace=NAMESPACE)
    made.start(handler)
    while not made.reachable():
        time.sleep(0.01)
    return made


def send_member(peers: list[Address], parts: int) -> None:
    member, payload = _member(0, peers, Counting()), memoryview(os.urandom(MAX_PART_BYTES))
    for _ in range(parts):
        member.send_part(1, LayerPart("0" * 32, 0, 0, 1), payload)


def take_member(peers: list[Address], parts: int) -> tuple[float, float]:
    clock = Counting()
    member = _member(1, peers, clock)
    took = clock.wait(parts)
    member.close()
    return took


def send_curve(peers: list[Address], parts: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    doorman = Curve(SECRET).admit(context, "")
    router, payload = context.socket(zmq.ROUTER), os.urandom(MAX_PART_BYTES)
    Curve(SECRET).serve(router)
    router.bind("tcp://{}:{}".format(*peers[0]))
    name = router.recv_multipart()[0]
    for _ in range(parts):
        taken = router.send_multipart([name, payload], copy=False, track=True)
        assert taken is not None
        taken.wait(WAIT_S)
    doorman.stop()


def take_curve(peers: list[Address], parts: int) -> tuple[float, float]:
    clock = Clock()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        Curve(SECRET).dial(dealer)
        dealer.rcvhwm = 1
        dealer.connect("tcp://{}:{}".format(*peers[0]))
        dealer.send(b"")
        for _ in range(parts):
            assert len(dealer.recv(copy=False)) == MAX_PART_BYTES
            clock.part()
    return clock.wait(parts)


def send_socket(peers: list[Address], parts: int) -> None:
    payload = os.urandom(MAX_PART_BYTES)
    with socket.create_server(peers[0]) as listening, listening.accept()[0] as connection:
        for _ in range(parts):
            connection.sendall(payload)


def take_socket(peers: list[Address], parts: int) -> tuple[float, float]:
    clock, buffer = Clock(), memoryview(bytearray(MAX_PART_BYTES))
    while True:
        try:
            connection = socket.create_connection(peers[0])
            break
        except ConnectionRefusedError:  # the other process has not begun to listen
            time.sleep(0.01)
    with connection:
        for _ in range(parts):
            connection.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
            clock.part()
    return clock.wait(parts)


Send = Callable[[list[Address], int], None]
Take = Callable[[list[Address], int], tuple[float, float]]
ARMS: dict[str, tuple[Send, Take]] = {
    "member": (send_member, take_member),
    "curve": (send_curve, take_curve),
    "socket": (send_socket, take_socket),
}


def _sender(arm: str, peers: list[Address], parts: int, pipe: Connection) -> None:
    began_s = time.process_time()
    ARMS[arm][0](peers, parts)
    pipe.send(time.process_time() - began_s)
    pipe.recv()  # what is on its way needs this process


def measure(arm: str, parts: int) -> tuple[float, float]:
    """GB/s, and processor seconds per GB."""
    peers = [("127.0.0.1", free_port()) for _ in range(2)]
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=_sender, args=(arm, peers, parts, theirs), daemon=True
    )
    child.start()
    wall_s, cpu_s = ARMS[arm][1](peers, parts)
    sender_cpu_s = ours.recv()
    ours.send(None)
    child.join(WAIT_S)
    gb = parts * MAX_PART_BYTES / 1e9
    return gb * (parts - 1) / parts / wall_s, (cpu_s + sender_cpu_s) / gb


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="of KV, in each run")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "runahead-link-cpu.json")
    args = parser.parse_args(argv)
    result = header("runahead_link", mib=args.mib, repeats=args.repeats)
    rates: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    names = list(ARMS)
    for repeat in range(args.repeats):
        turn = repeat % len(names)
        for arm in names[turn:] + names[:turn]:
            rate, cpu_s = measure(arm, max(2, args.mib * 2**20 // MAX_PART_BYTES))
            rates[arm].append(rate)
            cpu[arm].append(cpu_s)
    result["arms"] = {
        arm: {
            "gb_per_s": spread(rates[arm]),
            "to_socket": spread([a / b for a, b in zip(rates[arm], rates["socket"], strict=True)]),
            "cpu_s_per_gb": spread(cpu[arm]),
            "runs_gb_per_s": [round(each, 4) for each in rates[arm]],
        }
        for arm in names
    }
    finish(args.out, result)
    for arm, found in result["arms"].items():
        rate, share, cost = (
            found[key]["median"] for key in ("gb_per_s", "to_socket", "cpu_s_per_gb")
        )
        print(f"{arm:7} {rate:.2f} GB/s, {share:.2f} of the socket; {cost:.2f} s/GB")


if __name__ == "__main__":
    main()
