"""The circuit breaker, on a clock of its own."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_cake.stores.circuit_breaker import Breaker

FAILURES, FIRST_S, LAST_S = 3, 1.0, 8.0


def new():
    return Breaker(failures=FAILURES, first_s=FIRST_S, last_s=LAST_S)


def opened(now_s=0.0):
    breaker = new()
    for _ in range(FAILURES):
        breaker.failed(breaker.ask(now_s), now_s)
    return breaker


def test_breaker_opens_only_after_consecutive_failures():
    breaker = new()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            breaker.failed(breaker.ask(0), 0)
        breaker.succeeded(breaker.ask(0))
    assert breaker.is_closed
    assert opened().ask(0) is None
    assert opened().openings == 1


def test_breaker_after_the_wait_allows_exactly_one_probe():
    breaker = opened()
    assert breaker.ask(FIRST_S - 0.01) is None
    probe = breaker.ask(FIRST_S)
    assert probe is not None
    assert breaker.ask(FIRST_S + 100) is None
    breaker.succeeded(probe)
    assert breaker.is_closed
    assert breaker.ask(FIRST_S) is not None


def test_breaker_failed_probes_double_the_wait_and_success_resets_it():
    breaker, now_s, waits = opened(), 0.0, []
    for _ in range(5):
        before_s = now_s
        while (probe := breaker.ask(now_s)) is None:
            now_s += 0.5
        waits.append(now_s - before_s)
        breaker.failed(probe, now_s)
    assert waits == [1, 2, 4, 8, 8]
    breaker.succeeded(breaker.ask(now_s + LAST_S))
    for _ in range(FAILURES):
        breaker.failed(breaker.ask(now_s), now_s)
    assert breaker.ask(now_s + FIRST_S) is not None


def test_breaker_may_be_back_allows_one_probe_at_once():
    breaker = opened()
    breaker.may_be_back()
    probe = breaker.ask(0.1)
    assert breaker.ask(0.1) is None
    breaker.failed(probe, 0.1)
    assert breaker.ask(0.2) is None
    closed = new()
    closed.may_be_back()
    assert closed.is_closed


def test_breaker_abandoned_probe_allows_the_next_probe():
    breaker = opened()
    breaker.abandoned(breaker.ask(FIRST_S))
    assert not breaker.is_closed
    breaker.succeeded(breaker.ask(FIRST_S))
    assert breaker.is_closed


def test_breaker_results_of_calls_before_opening_are_ignored():
    breaker = new()
    early = [breaker.ask(0) for _ in range(FAILURES + 2)]
    for ticket in early[:FAILURES]:
        breaker.failed(ticket, 0)
    probe = breaker.ask(FIRST_S)
    breaker.failed(early[-1], FIRST_S)
    breaker.succeeded(early[-2])
    assert not breaker.is_closed
    assert breaker.openings == 1
    breaker.succeeded(probe)
    assert breaker.is_closed


class CircuitBreakerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: it never locks up, and it spares a dead server."""

    def __init__(self):
        super().__init__()
        self.breaker, self.now_s, self.tickets = new(), 0.0, []

    @rule()
    def ask(self):
        closed = self.breaker.is_closed
        ticket = self.breaker.ask(self.now_s)
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
        if self.breaker.is_closed:
            return
        ticket = self.breaker.ask(self.now_s + LAST_S)
        if ticket is None:
            assert self.tickets, "it waits for a probe that is nobody's"
        else:
            self.breaker.abandoned(ticket)


TestCircuitBreaker = CircuitBreakerMachine.TestCase
TestCircuitBreaker.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
