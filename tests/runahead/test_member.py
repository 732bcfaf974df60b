"""Chains of members on all transports: KV arrives whole, and every kind of trouble ends well."""

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_pool import SETTINGS, FakeRows, Worker
from hypothesis import given, settings
from hypothesis import strategies as st
from members import GROUPS, JOB, WAIT_S, MessageRecord
from polling import until

from sglang_cake.core.errors import RunaheadError
from sglang_cake.core.keys import Span
from sglang_cake.runahead.kv_passing import Broken, KvReceiver, KvSender, Late, Predecessor
from sglang_cake.runahead.member import COLD, Member, Owned
from sglang_cake.runahead.messages import (
    Accept,
    Cancel,
    Failed,
    HelpOffer,
    LayerPart,
    PeerGone,
    Refuse,
    new_job,
)
from sglang_cake.runahead.partition import Partition, even

SIZE = 3
OFFER: dict[str, Any] = {  # what most proposals have beside their prompt
    "namespace": "00",
    "extra_key": None,
    "cache_salt": None,
    "patience_s": WAIT_S,
}


class Group:
    def __init__(
        self, kind: str, clock: Callable[[], float] = time.monotonic, **changes: Any
    ) -> None:
        """Args: changes: of the settings of all members."""
        settings = replace(SETTINGS, **changes)
        self.transports = GROUPS[kind](SIZE)
        self.workers = [
            Worker(rank, transport, settings=settings, clock=clock)
            for rank, transport in enumerate(self.transports)
        ]
        self.stop = threading.Event()
        self.schedulers = [
            threading.Thread(target=worker.serve, args=(self.stop,), daemon=True)
            for worker in self.workers[:-1]
        ]
        for scheduler in self.schedulers:
            scheduler.start()
        until(
            lambda: all(len(t.reachable()) == SIZE - 1 for t in self.transports),
            "everybody sees everybody",  # not only the owner: helpers send to each other
        )
        until(lambda: len(self.owner.helpers()) == SIZE - 1, "all are free")

    @property
    def owner(self) -> Member:
        return self.workers[-1].member

    def propose(
        self, tokens: "array[int]", partition: Partition, patience_s: float = WAIT_S
    ) -> Owned:
        chain = (*range(partition.workers - 1), SIZE - 1)
        return self.owner.propose(chain, partition, tokens, **OFFER | {"patience_s": patience_s})

    def close(self) -> None:
        self.stop.set()
        for worker in self.workers:
            worker.pause.set()
            worker.member.close()


@pytest.fixture(params=GROUPS)
def new_group(request: pytest.FixtureRequest) -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(**settings: Any) -> Group:
        made.append(Group(request.param, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def group(new_group: Callable[..., Group]) -> Group:
    return new_group()


def prompt(tokens: int) -> "array[int]":
    return array("i", [(i * 37) % 1000 for i in range(tokens)])


def agreed(owned: Owned) -> None:
    until(lambda: owned.agreed or owned.refused or owned.passing.broken, "an answer")


@pytest.mark.parametrize("bounds", [(0, 40, 100), (0, 40, 70, 100), (0, 1, 2, 3), (32, 50, 80, 99)])
def test_runahead_member_every_layer_of_every_token_reaches_the_owner(
    new_group: Callable[..., Group], bounds: tuple[int, ...]
) -> None:
    group = new_group(part_bytes=7 * 24)  # seven tokens a part
    tokens = prompt(bounds[-1])
    for worker in group.workers:
        worker.cached = bounds[0]
    owned = group.propose(tokens, Partition(bounds))
    agreed(owned)
    assert owned.agreed
    group.workers[-1].own(owned, tokens)
    group.owner.end_owned(owned, "done")
    expected = (bounds[-2] - bounds[0]) * 24 * 5  # equation 6, last link
    assert owned.passing.receiver.bytes == expected
    for worker, span in zip(group.workers, Partition(bounds).spans[:-1], strict=False):
        until(lambda w=worker, s=span: w.computed == [tuple(s)], "the helper has its span")
    until(lambda: len(group.owner.helpers()) == SIZE - 1, "all are free again")
    assert not any(worker.errors for worker in group.workers)


def test_runahead_member_stopped_helper_is_late_and_left_out(
    new_group: Callable[..., Group],
) -> None:
    group = new_group(left_out_s=(60.0, 120.0))
    group.workers[1].dies_at = 2
    tokens = prompt(90)
    owned = group.propose(tokens, even(Span(0, 90), 3), patience_s=1.0)
    agreed(owned)
    slots = group.workers[-1].bind(owned, tokens)
    until(group.workers[1].pause_reached.is_set, "it has stopped")
    until(lambda: owned.passing.has(0) and owned.passing.has(1), "what was sent before that")
    with pytest.raises(Late):
        group.workers[-1].compute(owned, slots, tokens)
    group.owner.end_owned(owned, "failed")
    assert group.owner.helpers() == (0,)  # who was not late stays
    writes = group.workers[-1].rows.writes
    group.workers[1].pause.set()  # it comes to itself, and sends what it has
    one = group.workers[1]
    until(lambda: one.errors or one.computed, "it hears that the job is over, or ends it")
    assert group.workers[-1].rows.writes == writes  # nothing is written after the end


@pytest.mark.parametrize("who", [0, 1])
def test_runahead_member_closed_helper_ends_the_job_and_only_it_is_left_out(
    group: Group, who: int
) -> None:
    group.workers[who].dies_at = 3
    tokens = prompt(90)
    owned = group.propose(tokens, even(Span(0, 90), 3), patience_s=60.0)
    agreed(owned)
    assert owned.agreed  # one that heard of the end first would not begin

    def die() -> None:
        group.workers[who].pause_reached.wait(WAIT_S)
        group.transports[who].close()

    threading.Thread(target=die, daemon=True).start()
    with pytest.raises(Broken):
        group.workers[-1].own(owned, tokens)
    group.owner.end_owned(owned, "failed")
    other = group.workers[1 - who]  # the first of the chain waits for nobody: it may be done
    until(lambda: other.errors or other.computed, "the other helper ends too")
    until(lambda: group.owner.helpers() == (1 - who,), "only the dead one is left out")


@pytest.mark.parametrize("who", [0, 1])
def test_runahead_member_failed_helper_is_left_out_until_it_has_helped(
    new_group: Callable[..., Group], who: int
) -> None:
    ahead_s = [0.0]
    group = new_group(left_out_s=(600.0, 900.0), clock=lambda: time.monotonic() + ahead_s[0])
    failing = group.workers[who]
    failing.dies_at = failing.raises_at = 2
    tokens = prompt(90)
    owned = group.propose(tokens, even(Span(0, 90), 3), patience_s=60.0)
    agreed(owned)
    assert owned.agreed  # one that heard of the end first would not begin

    def go_on() -> None:
        failing.pause_reached.wait(WAIT_S)
        failing.pause.set()

    threading.Thread(target=go_on, daemon=True).start()
    with pytest.raises(Broken, match=f"member {who}: no memory"):
        group.workers[-1].own(owned, tokens)
    group.owner.end_owned(owned, "failed")
    assert group.owner.helpers() == (1 - who,)
    other = group.workers[1 - who]  # the first of the chain waits for nobody: it may be done
    until(lambda: other.errors or other.computed, "the other helper ends too")
    failing.dies_at = failing.raises_at = None
    ahead_s[0] = 601.0
    until(lambda: len(group.owner.helpers()) == SIZE - 1, "it is asked again")
    tried = group.propose(tokens, even(Span(0, 90), 3))
    agreed(tried)
    assert tried.agreed
    group.workers[-1].own(tried, tokens)
    group.owner.end_owned(tried, "done")
    until(lambda: all(w.member.helpers() for w in group.workers), "nobody is busy")
    again = group.propose(tokens, even(Span(0, 90), 3))
    agreed(again)
    group.owner.on_message(who, Failed(again.passing.job, who, "no memory"))
    group.owner.end_owned(again, "failed")
    assert group.owner.helpers() == (1 - who,)
    ahead_s[0] += 601.0  # it has helped, so the pause is the first one again
    assert group.owner.helpers() == (0, 1)


@pytest.mark.parametrize("fault", ["read_fails", "buffer_fails"])
def test_runahead_member_helper_failing_to_read_its_kv_is_left_out(
    new_group: Callable[..., Group], fault: str
) -> None:
    group = new_group(left_out_s=(60.0, 120.0))
    setattr(group.workers[0].rows, fault, True)
    tokens = prompt(90)
    owned = group.propose(tokens, even(Span(0, 90), 3), patience_s=60.0)
    agreed(owned)
    with pytest.raises(Broken, match="member 0: nothing to copy it to"):
        group.workers[-1].own(owned, tokens)
    group.owner.end_owned(owned, "failed")
    assert group.owner.helpers() == (1,)


def test_runahead_member_own_fault_pauses_its_asking_until_a_chain_is_done(
    new_group: Callable[..., Group],
) -> None:
    ahead_s = [0.0]
    group = new_group(left_out_s=(600.0, 900.0), clock=lambda: time.monotonic() + ahead_s[0])
    tokens, partition = prompt(90), even(Span(0, 90), 3)
    owned = group.propose(tokens, partition)
    agreed(owned)
    owned.passing.break_off("no memory")
    group.owner.end_owned(owned, "failed", "no memory")
    assert group.owner.helpers() == ()
    for worker in group.workers[:-1]:  # the first of the chain waits for nobody: it may be done
        until(lambda w=worker: w.errors or w.computed, "it hears that the job is over")
    ahead_s[0] = 601.0
    until(lambda: len(group.owner.helpers()) == SIZE - 1, "it asks again")
    again = group.propose(tokens, partition)
    agreed(again)
    assert again.agreed
    group.workers[-1].own(again, tokens)
    group.owner.end_owned(again, "done")
    assert group.owner.helpers() == (0, 1)


def test_inflow_late_names_the_helper_whose_kv_is_missing() -> None:
    def came(*spans: Span) -> int | None:
        rows = FakeRows(1)
        receiver = KvReceiver(rows, [Predecessor(5, Span(0, 4)), Predecessor(3, Span(4, 10))])
        receiver.bind(rows.alloc(10), 0)
        for span in spans:
            data = memoryview(bytearray(span.tokens * rows.token_bytes))
            receiver.part(LayerPart("", 0, *span), data)
        with pytest.raises(Late) as late:
            receiver.wait(0, 0.02, lambda: None)
        return late.value.culprit

    assert came(Span(4, 10)) == 5
    assert came(Span(0, 4), Span(4, 9)) == 3
    assert came(Span(0, 4)) == 3
    assert came() == 3  # who would have handed on the rest


def test_runahead_member_part_that_comes_before_the_answer_is_an_answer(group: Group) -> None:
    group.stop.set()
    for scheduler in group.schedulers:
        scheduler.join()  # nobody answers
    owned = group.propose(prompt(90), even(Span(0, 90), 3))
    part = LayerPart(owned.passing.job, 0, 0, 60)
    taking = threading.Thread(target=group.owner.on_part, args=(1, part, memoryview(b"")))
    taking.start()  # it waits for the slots of the part
    until(lambda: owned.accepted == {1}, "the answer")
    group.owner.end_owned(owned, "cancelled")
    taking.join(WAIT_S)
    assert not taking.is_alive()


@pytest.mark.parametrize(("named", "left"), [(1, 1), (0, 0), (7, 0), (2, 0)])
def test_hop_failure_names_the_helper_or_blames_the_sender(
    new_group: Callable[..., Group], named: int, left: int
) -> None:
    group = new_group(left_out_s=(60.0, 120.0))
    owned = group.propose(prompt(90), even(Span(0, 90), 3))
    agreed(owned)
    group.owner.on_message(0, Failed(owned.passing.job, named, "it says"))
    group.owner.end_owned(owned, "failed")
    assert group.owner.helpers() == (1 - left,)  # 2 is the owner itself


def test_runahead_member_slow_helper_within_patience_is_kept(group: Group) -> None:
    group.workers[1].slow_s = 0.05  # a layer
    tokens = prompt(90)
    owned = group.propose(tokens, even(Span(0, 90), 3), patience_s=60.0)
    agreed(owned)
    slots = group.workers[-1].own(owned, tokens)
    group.owner.end_owned(owned, "done")
    assert len(slots) == len(tokens)
    assert owned.passing.receiver.waited_s > 0
    assert group.owner.helpers() == (0, 1)


def test_runahead_member_two_of_three_share_before_the_third_joins() -> None:
    transports = GROUPS["tcp"](3)
    one, owner = Worker(0, transports[0]), Worker(2, transports[2])
    stop = threading.Event()
    threading.Thread(target=one.serve, args=(stop,), daemon=True).start()
    until(lambda: owner.member.helpers() == (0,), "the first is there")
    until(lambda: transports[0].reachable() == {2}, "and sees the owner")
    tokens = prompt(50)
    owned = owner.member.propose((0, 2), even(Span(0, 50), 2), tokens, **OFFER)
    agreed(owned)
    owner.own(owned, tokens)
    owner.member.end_owned(owned, "done")
    second = Worker(1, transports[1])
    until(lambda: owner.member.helpers() == (0, 1), "the third joins")
    stop.set()
    for worker in (one, owner, second):
        worker.member.close()


def test_runahead_member_cancelled_job_stops_its_helpers(group: Group) -> None:
    group.workers[0].dies_at = 1
    owned = group.propose(prompt(90), even(Span(0, 90), 3))
    agreed(owned)
    until(lambda: not group.workers[0].pause.is_set(), "it is in the middle")
    group.owner.end_owned(owned, "cancelled", "aborted by its user")
    until(lambda: group.workers[1].errors, "the one that waits stops")
    helping = group.workers[0].helping
    assert helping is not None
    until(lambda: helping.passing.broken, "the one that computes has heard")
    group.workers[0].pause.set()
    for worker in group.workers[:-1]:
        until(lambda w=worker: w.errors, "it stops")
        assert "cancelled" in worker.errors[0]
    until(lambda: len(group.owner.helpers()) == SIZE - 1, "nobody is left out for that")


def test_runahead_member_colder_or_busy_helper_refuses(group: Group) -> None:
    owned = group.propose(prompt(90), Partition((32, 60, 90)))
    agreed(owned)
    assert owned.refused == f"member 0 refuses: {COLD}"
    group.owner.end_owned(owned, "cancelled", "refused")
    busy = group.workers[0]
    busy.dies_at = 0
    first = group.propose(prompt(90), even(Span(0, 90), 3))
    until(busy.pause_reached.is_set, "it computes")
    assert busy.member.helpers() == ()  # a helper asks nobody
    group.owner.end_owned(first, "cancelled", "enough")
    again = group.propose(prompt(90), even(Span(0, 90), 2))
    agreed(again)
    assert again.refused == "member 0 refuses: busy"  # it is still in that layer
    group.owner.end_owned(again, "cancelled", "refused")


def test_runahead_member_two_owners_asking_at_once_both_refuse() -> None:
    transports = GROUPS["tcp"](2)
    one, two = (Worker(rank, t) for rank, t in enumerate(transports))
    until(lambda: one.member.helpers() and two.member.helpers(), "both are there")
    plan, offer = Partition((0, 5, 10)), OFFER | {"patience_s": 1.0}
    a = one.member.propose((1, 0), plan, prompt(10), **offer)
    b = two.member.propose((0, 1), plan, prompt(10), **offer)
    for owned in (a, b):  # whoever got the offer before it asked looks now
        until(lambda: one.member.next_offer() or two.member.next_offer() or a.refused, "one")
        until(lambda: one.member.next_offer() or two.member.next_offer() or b.refused, "two")
        assert owned.refused == f"member {1 if owned is a else 0} refuses: busy"
        assert not owned.agreed
    one.member.end_owned(a, "cancelled", "refused")
    two.member.end_owned(b, "cancelled", "refused")
    for each in (one, two):
        assert each.member.next_offer() is None
        each.member.close()


def test_runahead_member_unreachable_helper_is_not_asked(group: Group) -> None:
    group.transports[0].close()
    until(lambda: group.owner.helpers() == (1,), "one is left")
    with pytest.raises(RunaheadError):
        group.propose(prompt(9), even(Span(0, 9), 3))
    assert group.owner.next_offer() is None


def test_runahead_member_offer_that_cannot_be_written_ends_the_job(
    new_group: Callable[..., Group],
) -> None:
    group = new_group(left_out_s=(0.1, 0.1))
    with pytest.raises(UnicodeEncodeError):
        group.owner.propose(
            (0, SIZE - 1), Partition((0, 5, 9)), prompt(9), **OFFER | {"cache_salt": "\ud800"}
        )
    until(lambda: len(group.owner.helpers()) == SIZE - 1, "the owner may ask again")


@pytest.mark.parametrize("kind", GROUPS)
def test_runahead_member_offer_for_another_member_is_refused(kind: str) -> None:
    transports, record = GROUPS[kind](3), MessageRecord()
    worker = Worker(0, transports[0])
    transports[2].start(record)
    until(lambda: transports[2].reachable() == {0}, "the worker is there")
    tokens = prompt(10)
    wrong = HelpOffer(new_job(), (1, 2), (0, 10, 20), "00", None, None, tokens)
    transports[2].send(0, wrong)  # this member is not in the chain
    ours = HelpOffer(new_job(), (0, 1), (0, 10, 20), "00", None, None, tokens)
    transports[2].send(0, ours)  # its owner is somebody else
    until(lambda: len(record.heard) == 2, "answers")
    refusals = [Refuse(each.job, "this offer is not for me") for each in (wrong, ours)]
    assert [message for _, message, _ in record.heard] == refusals
    assert worker.member.next_offer() is None
    for each in transports:
        each.close()


@settings(max_examples=50)
@given(st.data())
def test_inflow_takes_each_part_once_in_any_order_and_nothing_else(data: st.DataObject) -> None:
    source, rows = FakeRows(3), FakeRows(3)
    span = Span(10, data.draw(st.integers(11, 60)))
    keep = data.draw(st.integers(span.start, span.stop))
    tokens = list(range(200, 200 + span.tokens))
    theirs, ours = source.alloc(span.tokens), rows.alloc(span.stop - keep)
    cuts = sorted(
        data.draw(st.sets(st.integers(span.start + 1, span.stop - 1), max_size=5))
        if span.tokens > 1
        else []
    )
    edges = [span.start, *cuts, span.stop]
    parts = [LayerPart("", layer, a, b) for layer in range(3) for a, b in pairwise(edges)]
    receiver = KvReceiver(rows, [Predecessor(0, span)])
    receiver.bind(ours, keep)
    for layer in range(3):
        source.put(layer, theirs, tokens)
    for part in data.draw(st.permutations(parts)):
        out = memoryview(bytearray((part.stop - part.start) * rows.token_bytes))
        source.read(part.layer, theirs[part.start - 10 : part.stop - 10], out)
        receiver.part(part, out)
        with pytest.raises(Broken):
            receiver.part(part, out)
    for layer in range(3):
        receiver.wait(layer, 1.0, lambda: None)
        assert rows.holds(layer, ours, tokens[keep - span.start :])
    for bad in (LayerPart("", 3, 10, 11), LayerPart("", 0, 9, 11), LayerPart("", 0, 10, 999)):
        with pytest.raises(Broken):
            receiver.part(bad, memoryview(bytes((bad.stop - bad.start) * rows.token_bytes)))
    with pytest.raises(Broken):
        receiver.part(LayerPart("", 0, 10, 11), memoryview(bytes(5)))


def test_inflow_part_of_a_forward_that_does_not_begin_is_refused() -> None:
    rows = FakeRows(1)
    receiver = KvReceiver(rows, [Predecessor(0, Span(0, 4))], bind_s=0.01)
    with pytest.raises(Broken):
        receiver.part(LayerPart("", 0, 0, 4), memoryview(bytes(4 * rows.token_bytes)))


@pytest.mark.parametrize("at_once", [True, False])
def test_inflow_close_waits_for_the_write_under_way(at_once: bool) -> None:
    from fake_pool import Done

    class Later:
        def wait(self) -> None:
            started.set()
            closes.wait(WAIT_S)
            ended.set()

    class Slow(FakeRows):
        def write(self, *args: object) -> Done | Later:  # type: ignore[override]
            if at_once:
                Later().wait()
            done = super().write(*args)  # type: ignore[arg-type]
            return done if at_once else Later()

    started, closes, ended = threading.Event(), threading.Event(), threading.Event()
    rows = Slow(1)
    receiver = KvReceiver(rows, [Predecessor(0, Span(0, 4))])
    receiver.bind(rows.alloc(4), 0)
    data = memoryview(bytes(4 * rows.token_bytes))
    threading.Thread(
        target=lambda: receiver.part(LayerPart("", 0, 0, 4), data), daemon=True
    ).start()
    assert started.wait(WAIT_S)
    closes.set()
    receiver.close()
    assert ended.is_set()
    assert rows.writes == 1
    with pytest.raises(Broken):
        receiver.part(LayerPart("", 0, 0, 4), data)


def test_kv_sender_drained_has_sent_every_layer_and_looks_meanwhile() -> None:
    allowed, accepted = threading.Semaphore(0), [0]

    def send(*args: object) -> None:
        assert allowed.acquire(timeout=WAIT_S)
        accepted[0] += 1

    rows, looks = FakeRows(5), [0]
    sender = KvSender(rows, JOB, send, lambda error: None)

    def look() -> None:
        if accepted[0] == looks[0]:  # the part before was accepted
            looks[0] += 1
            allowed.release()

    sender.bind(rows.alloc(4), Span(0, 4))
    sender.ready(4)
    sender.drain(look)
    assert accepted == [5]
    sender.close()


def test_kv_sender_that_cannot_send_ends_the_drain() -> None:
    def send(*args: object) -> None:
        raise PeerGone("it takes nothing")

    rows, errors = FakeRows(5), []
    sender = KvSender(rows, JOB, send, errors.append)

    def look() -> None:
        if errors:
            raise errors[0]

    sender.bind(rows.alloc(4), Span(0, 4))
    sender.ready(4)
    with pytest.raises(PeerGone):
        sender.drain(look)
    sender.close()


def test_runahead_member_part_before_its_offer_is_kept_for_it() -> None:
    transports = GROUPS["tcp"](3)
    workers = [Worker(rank, t) for rank, t in enumerate(transports)]
    middle = workers[1]
    until(lambda: all(len(each.reachable()) == 2 for each in transports), "all are there")
    offer = HelpOffer(new_job(), (0, 1, 2), (0, 4, 8, 12), "00", None, None, prompt(8))
    workers[0].rows.put(0, [0, 1, 2, 3], offer.tokens[:4])
    data = memoryview(bytearray(4 * workers[0].rows.token_bytes))
    workers[0].rows.read(0, [0, 1, 2, 3], data)
    transports[0].send_part(1, LayerPart(offer.job, 0, 0, 4), data)
    transports[2].send(1, offer)
    found = until(middle.member.next_offer, "the offer")
    helping = middle.member.accept(found)
    slots = middle.rows.alloc(4)
    helping.passing.receiver.bind(slots, 0)
    helping.passing.receiver.wait(0, WAIT_S, helping.passing.check)
    assert middle.rows.holds(0, slots, offer.tokens[:4])
    middle.member.end_helping(helping, None)
    for worker in workers:
        worker.member.close()


def test_runahead_member_silent_helper_is_not_asked_for_busy_s(
    new_group: Callable[..., Group],
) -> None:
    ahead_s = [0.0]
    group = new_group(busy_s=(60.0, 60.0), clock=lambda: time.monotonic() + ahead_s[0])
    group.stop.set()  # their schedulers are in a long step
    for scheduler in group.schedulers:
        scheduler.join()
    owned = group.propose(prompt(90), even(Span(0, 90), 3))
    group.owner.end_owned(owned, "cancelled", "aborted")  # before their answers were due
    assert len(group.owner.helpers()) == SIZE - 1
    owned = group.propose(prompt(90), even(Span(0, 90), 3))
    ahead_s[0] = 1.0
    group.owner.end_owned(owned, "cancelled", "no answer")
    assert group.owner.helpers() == ()
    ahead_s[0] = 62.0
    assert len(group.owner.helpers()) == SIZE - 1  # they are asked again


@pytest.mark.parametrize("refuses", [True, False])
def test_runahead_member_that_does_not_help_is_asked_less_often_until_it_accepts(
    new_group: Callable[..., Group], refuses: bool
) -> None:
    now_s = [0.0]
    group = new_group(busy_s=(1.0, 4.0), answer_s=0.0, clock=lambda: now_s[0])
    group.stop.set()
    for scheduler in group.schedulers:
        scheduler.join()  # the test answers

    def ask(*, accepts: bool = False) -> None:
        owned = group.propose(prompt(90), even(Span(0, 90), 2))
        if accepts:
            group.owner.on_message(0, Accept(owned.passing.job))
        elif refuses:
            group.owner.on_message(0, Refuse(owned.passing.job, "busy"))
        group.owner.end_owned(owned, "cancelled")

    def asked_at() -> list[float]:
        times = []
        for _ in range(12):
            if 0 in group.owner.helpers():
                times.append(now_s[0])
                ask()
            assert 1 in group.owner.helpers()  # an idle one is asked meanwhile
            now_s[0] += 1.0
        return times

    assert asked_at() == [0.0, 1.0, 3.0, 7.0, 11.0]
    now_s[0] = 100.0
    ask(accepts=True)
    assert asked_at() == [100.0, 101.0, 103.0, 107.0, 111.0]


def test_runahead_member_without_the_front_is_asked_for_new_prompts(
    new_group: Callable[..., Group],
) -> None:
    group = new_group(busy_s=(60.0, 60.0))
    owned = group.propose(prompt(90), Partition((32, 60, 90)))
    agreed(owned)
    assert owned.refused == f"member 0 refuses: {COLD}"
    group.owner.end_owned(owned, "cancelled", "refused")
    assert group.owner.helpers(32) == (1,)
    assert group.owner.helpers() == (0, 1)


def test_runahead_member_refusal_of_another_is_not_held_against_a_member(
    new_group: Callable[..., Group],
) -> None:
    group = new_group(busy_s=(60.0, 60.0))
    group.stop.set()
    for scheduler in group.schedulers:
        scheduler.join()  # nobody answers
    owned = group.propose(prompt(90), even(Span(0, 90), 3))
    group.owner.on_message(0, Refuse(owned.passing.job, "busy"))
    group.owner.end_owned(owned, "cancelled", owned.refused or "")
    assert group.owner.helpers() == (1,)  # it had no time to answer


@pytest.mark.parametrize("ends", ["cancelled", "gone"])
def test_runahead_member_offers_that_ended_during_a_pause_are_not_taken(ends: str) -> None:
    transports = GROUPS["tcp"](2)
    helper = Worker(0, transports[0]).member  # its scheduler asks for no offer
    for _ in range(300):
        offer = HelpOffer(new_job(), (0, 1), (0, 4, 8), "00", None, None, prompt(4))
        helper.on_message(1, offer)
        if ends == "cancelled":
            helper.on_message(1, Cancel(offer.job, "no answer"))
    if ends == "gone":
        helper.on_gone(1, "it was restarted")
    assert helper.next_offer() is None
    for each in transports:
        each.close()


def test_runahead_member_link_speed_is_measured_from_parts(group: Group) -> None:
    rows, transports = group.workers[-1].rows, group.transports
    assert group.owner.bytes_per_s() is None
    data = memoryview(bytearray(2**20 // rows.token_bytes * rows.token_bytes))
    part = LayerPart(new_job(), 0, 0, len(data) // rows.token_bytes)
    for _ in range(2):  # the second tells how long the first one took
        transports[0].send_part(SIZE - 1, part, data)
    group.workers[-1].member.on_message(0, Cancel(part.job, "parts of no job wait for it"))
    until(lambda: group.owner.bytes_per_s() is not None, "parts came")
    measured = group.owner.bytes_per_s()
    assert measured is not None
    assert 1e5 < measured < 1e13
