"""The circuit breaker, on a clock of its own."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_cake.stores.circuit_breaker import FIRST_S, LAST_S, Breaker

FAILURES = 3


both_kinds = pytest.mark.parametrize("calls_may_hang", [False, True])


def new(*, calls_may_hang=False):
    return Breaker(failures=FAILURES, calls_may_hang=calls_may_hang)


def ask(breaker, now_s):
    """Ticket for a call, or None."""
    return breaker.begin(now_s) if breaker.may_call(now_s) else None


def opened(now_s=0.0, *, calls_may_hang=False):
    breaker = new(calls_may_hang=calls_may_hang)
    for _ in range(FAILURES):
        breaker.failed(breaker.begin(now_s), now_s)
    return breaker


@both_kinds
def test_breaker_opens_only_after_consecutive_failures(calls_may_hang):
    breaker = new(calls_may_hang=calls_may_hang)
    for _ in range(3):
        for _ in range(FAILURES - 1):
            breaker.failed(ask(breaker, 0), 0)
        breaker.succeeded(ask(breaker, 0))
    assert breaker.is_closed
    assert ask(opened(), 0) is None
    assert opened().openings == 1


def test_breaker_after_the_wait_allows_exactly_one_probe():
    breaker = opened()
    assert ask(breaker, FIRST_S - 0.01) is None
    probe = ask(breaker, FIRST_S)
    assert probe is not None
    assert ask(breaker, FIRST_S + 100) is None
    breaker.succeeded(probe)
    assert breaker.is_closed
    assert ask(breaker, FIRST_S) is not None


def test_breaker_probe_that_hangs_is_followed_by_another_after_a_pause():
    breaker = opened(10.0, calls_may_hang=True)
    assert not breaker.may_call(10.0 + FIRST_S - 0.01)
    hanging = ask(breaker, 10.0 + FIRST_S)
    assert not breaker.may_call(10.0 + 2 * FIRST_S - 0.01), "the first one may still return"
    later = ask(breaker, 10.0 + 2 * FIRST_S)
    breaker.failed(later, 12.0)
    breaker.failed(hanging, 12.0)
    assert breaker.may_call(12.0 + 2 * FIRST_S), "two probes of one outage count once"
    breaker.succeeded(hanging)
    assert breaker.is_closed


@both_kinds
def test_breaker_failed_probes_double_the_wait_and_success_resets_it(calls_may_hang):
    breaker, now_s, waits = opened(calls_may_hang=calls_may_hang), 0.0, []
    for _ in range(8):
        before_s = now_s
        while (probe := ask(breaker, now_s)) is None:
            now_s += 0.5
        waits.append(now_s - before_s)
        breaker.failed(probe, now_s)
    assert waits == [1, 2, 4, 8, 16, 32, LAST_S, LAST_S]
    breaker.succeeded(ask(breaker, now_s + LAST_S))
    for _ in range(FAILURES):
        breaker.failed(ask(breaker, now_s), now_s)
    assert ask(breaker, now_s + FIRST_S) is not None


def test_breaker_may_be_back_allows_one_probe_at_once():
    breaker = opened()
    breaker.may_be_back()
    probe = ask(breaker, 0.1)
    assert ask(breaker, 0.1) is None
    breaker.failed(probe, 0.1)
    assert ask(breaker, 0.2) is None
    closed = new()
    closed.may_be_back()
    assert closed.is_closed


def test_breaker_abandoned_probe_allows_the_next_probe():
    breaker = opened()
    breaker.abandoned(ask(breaker, FIRST_S))
    assert not breaker.is_closed
    breaker.succeeded(ask(breaker, FIRST_S))
    assert breaker.is_closed


@both_kinds
def test_breaker_failures_of_calls_before_opening_are_ignored(calls_may_hang):
    breaker = new(calls_may_hang=calls_may_hang)
    early = [breaker.begin(0) for _ in range(FAILURES + 2)]
    for ticket in early:
        breaker.failed(ticket, 0.5)
    assert breaker.openings == 1
    assert breaker.may_call(0.5 + FIRST_S)


@both_kinds
def test_breaker_success_from_before_opening_closes_it_only_if_calls_may_hang(calls_may_hang):
    breaker = new(calls_may_hang=calls_may_hang)
    early = [breaker.begin(0) for _ in range(FAILURES + 1)]
    for ticket in early[:FAILURES]:
        breaker.failed(ticket, 0)
    probe = ask(breaker, FIRST_S)
    breaker.succeeded(early[-1])
    assert breaker.is_closed is calls_may_hang
    breaker.succeeded(probe)
    assert breaker.is_closed


class CircuitBreakerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: it never locks up, and it spares a dead server."""

    def __init__(self):
        super().__init__()
        self.breaker, self.now_s, self.tickets = new(), 0.0, []
        self.calls_may_hang = False

    @initialize(calls_may_hang=st.booleans())
    def choose(self, calls_may_hang):
        self.calls_may_hang = calls_may_hang
        self.breaker = new(calls_may_hang=calls_may_hang)

    @rule()
    def call(self):
        closed = self.breaker.is_closed
        ticket = ask(self.breaker, self.now_s)
        assert ticket is not None or not closed
        if ticket is not None:
            self.tickets.append(ticket)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds):
        self.now_s += seconds

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), end=st.sampled_from(["succeeded", "failed", "abandoned"]))
    def end(self, data, end):
        ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        if end == "failed":
            self.breaker.failed(ticket, self.now_s)
        else:
            getattr(self.breaker, end)(ticket)

    @invariant()
    def it_can_always_close_again(self):
        if not self.breaker.may_call(self.now_s + LAST_S):
            assert not self.calls_may_hang
            assert self.tickets, "it waits for a probe that is nobody's"


TestCircuitBreaker = CircuitBreakerMachine.TestCase
TestCircuitBreaker.settings = settings(max_examples=50, stateful_step_count=30)
