"""The scheduler thread sleeps until there is something to do."""

import math
import threading
from collections.abc import Iterator

import pytest
import zmq

from sglang_cake.integration.scheduler.waker import Waker, sleep_s


@pytest.fixture
def requests() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
        context.socket(zmq.PUSH) as push,
    ):
        pull.bind("inproc://requests")
        push.connect("inproc://requests")
        yield pull, push


@pytest.mark.parametrize(
    ("awake_s", "loads_over_in_s", "longest_s"),
    [
        (0.0001, math.inf, 0.0019),  # a twentieth of the time
        (0.1, math.inf, 0.05),
        (0.1, 0.06, 0.03),
        (0.1, 0.0, 0.002),  # they are late
    ],
)
def test_waker_sleep_is_shorter_the_sooner_the_loads_are_over(
    awake_s: float, loads_over_in_s: float, longest_s: float
) -> None:
    assert sleep_s(awake_s, loads_over_in_s) == pytest.approx(longest_s)


def test_waker_sleep_without_an_event_ends_by_itself() -> None:
    waker = Waker()
    assert not waker.sleep(object())
    assert not waker.sleep(object())


def test_waker_wake_before_the_sleep_ends_it_once() -> None:
    waker = Waker()
    waker.wake()
    waker.wake()
    assert waker.sleep(object())
    assert not waker.sleep(object())


def test_waker_wake_from_another_thread_ends_a_sleep() -> None:
    waker = Waker()
    thread = threading.Thread(target=waker.wake)
    thread.start()
    while not waker.sleep(object()):
        pass
    thread.join()
    assert not waker.sleep(object())


def test_waker_request_ends_the_sleep_until_it_is_received(
    requests: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    pull, push = requests
    waker = Waker()
    assert not waker.sleep(pull)
    push.send(b"request")
    while not waker.sleep(pull):
        pass
    assert waker.sleep(pull)
    pull.recv()
    assert not waker.sleep(pull)
