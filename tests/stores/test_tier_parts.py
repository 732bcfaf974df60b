"""The decisions of a tiered store, one by one, without I/O or a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.stores.link_speed import RATE_FRESH_S, TierLink, quickest, soonest
from sglang_cake.stores.tiers.tiered_store import REREAD_S, PromoteOnSecondRead, TierLocations
from sglang_cake.testing.store_contract import key_of

BLOCK = 100


def test_quickest_ignores_queued_bytes_and_outdated_rates():
    slow, quick, unknown = TierLink(), TierLink(), TierLink()
    slow.transferred(BLOCK, 0.0, 10.0)
    quick.transferred(BLOCK, 0.0, 1.0)
    quick.started(100 * BLOCK)
    assert quickest([slow, quick], 10.0) == 1
    assert quickest([quick, unknown], 10.0) == 0
    assert quickest([unknown, quick], 10.0) == 0, "the first is said to be the fastest"
    assert quickest([slow, quick], 10.0 + 2 * RATE_FRESH_S) == 0, "nothing is known any more"


def link(s_per_block=None, under_way=0, now_s=0.0):
    made = TierLink()
    if s_per_block is not None:
        made.started(BLOCK)
        made.transferred(BLOCK, now_s - s_per_block, now_s)
        made.ended(BLOCK)
    made.started(under_way * BLOCK)
    return made


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ([link(1.0), link(4.0)], 0),
        ([link(4.0), link(1.0)], 1),
        ([link(1.0, under_way=2), link(4.0)], 0),  # 3 s against 4 s
        ([link(1.0, under_way=3), link(4.0)], 0),  # a tie: the faster tier
        ([link(1.0, under_way=4), link(4.0)], 1),
        ([link(), link()], 0),
        ([link(under_way=1), link()], 1),
        ([link(under_way=2), link(under_way=1)], 1),
        ([link(under_way=1), link(under_way=1)], 0),
        ([link(1.0), link()], 0),  # no reason to find out
        ([link(1.0, under_way=1), link()], 1),
        ([link(1.0, under_way=5), link(under_way=1)], 0),  # one is enough to find out
        ([link(1.0), link(1.0, under_way=1), link(9.0)], 0),
    ],
)
def test_soonest_picks_the_tier_that_delivers_first(links, expected):
    assert soonest(links, BLOCK, 0.0) == expected


def test_tier_link_rate_counts_busy_time_only():
    one = TierLink()
    for _ in range(2):
        one.started(BLOCK)
    # Two reads shared the link from 0 to 2 s: a block takes 1 s, though each read took 2.
    for _ in range(40):
        one.transferred(BLOCK, 0.0, 2.0)
    assert one.s_per_byte(2.0) == pytest.approx(0.0, abs=1e-6)
    # (Forty landings in one moment are a fast link; what counts is the time between landings.)
    for turn in range(40):
        one.transferred(BLOCK, 2.0, 3.0 + turn)
    assert one.s_per_byte(42.0) == pytest.approx(1.0 / BLOCK, rel=1e-3)
    # Idle time is nobody's.
    one.transferred(BLOCK, 60.0, 61.0)
    assert one.s_per_byte(61.0) == pytest.approx(1.0 / BLOCK, rel=1e-3)


def test_tier_link_old_measurement_is_forgotten():
    old = link(9.0)
    assert old.s_per_byte(RATE_FRESH_S) is not None
    assert old.s_per_byte(RATE_FRESH_S + 1) is None
    old.transferred(BLOCK, RATE_FRESH_S + 9, RATE_FRESH_S + 10)
    assert old.s_per_byte(RATE_FRESH_S + 10) == pytest.approx(1.0 / BLOCK)


@given(
    rates=st.lists(st.floats(0.01, 100), min_size=2, max_size=4),
    reads=st.integers(50, 300),
    depth=st.integers(8, 16),
)
def test_soonest_with_many_reads_adds_up_the_bandwidths(rates, reads, depth):
    """Theory C.3: 1/l = sum(1/l_j). Links that serve one block after the other, in virtual time."""
    links = [link(1.0 / rate, now_s=0.0) for rate in rates]
    now_s, free_s, served = 0.0, [0.0] * len(rates), [0] * len(rates)
    landings = []  # (at, link, started)
    for _ in range(reads):
        if len(landings) == depth:
            landings.sort()
            now_s, which, started_s = landings.pop(0)
            links[which].transferred(BLOCK, started_s, now_s)
            links[which].ended(BLOCK)
        # Rates are known: a block that no link has carried for a minute is another test's matter.
        for each, rate in zip(links, rates, strict=True):
            if each.s_per_byte(now_s) is None:
                each.transferred(BLOCK, now_s - 1.0 / rate, now_s)
        which = soonest(links, BLOCK, now_s)
        links[which].started(BLOCK)
        free_s[which] = max(free_s[which], now_s) + 1.0 / rates[which]
        served[which] += 1
        landings.append((free_s[which], which, now_s))
    end_s = max(at_s for at_s, _, _ in landings)
    ideal_s = reads / sum(rates)
    alone_s = reads / max(rates)
    # The last blocks under way, at most one a link beyond what each should have, are the slack.
    slack_s = max(depth / sum(rates), 1.0 / max(rates)) * 2
    assert end_s <= min(alone_s, 1.3 * ideal_s) + slack_s


def test_tier_locations_keep_the_latest_answer_of_each_tier():
    where = TierLocations()
    key = key_of("a")
    assert where.of(key) == (0, 0)
    where.learn(key, asked=0b011, having=0b010)
    assert where.of(key) == (0b010, 0b001)
    where.learn(key, asked=0b101, having=0b100)
    assert where.of(key) == (0b110, 0b001)
    where.learn(key, asked=0b010, having=0)
    assert where.of(key) == (0b100, 0b011)
    where.learn(key, asked=0b100, having=0)
    assert where.of(key) == (0, 0), "what nobody has is not remembered"
    where.learn(key, asked=0b1, having=0b1)
    where.forget(key)
    where.forget(key)
    assert where.of(key) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(0, 7)), max_size=30))
def test_tier_locations_never_have_and_lack_the_same_block(answers):
    where = TierLocations()
    where.max_keys = 3
    for name, asked, having in answers:
        where.learn(key_of(name), asked=asked, having=having & asked)
        known = where.of(key_of(name))
        assert known.having & known.lacking == 0
        assert known.having & asked == having & asked
        assert sum(any(where.of(key_of(name))) for name in range(4)) <= 3


def test_tier_memories_beyond_their_limit_drop_the_oldest_key():
    where, rereads = TierLocations(), PromoteOnSecondRead()
    where.max_keys = rereads.max_keys = 2
    for name in range(3):
        where.learn(key_of(name), asked=1, having=1)
        assert not rereads.read(key_of(name), 0.0)
    assert [where.of(key_of(name)).having for name in range(3)] == [0, 1, 1]
    assert not rereads.read(key_of(0), 0.0)
    assert rereads.read(key_of(2), 0.0)


def test_promote_on_second_read_needs_two_reads_within_the_period():
    rereads = PromoteOnSecondRead()
    assert not rereads.read(key_of("a"), 0.0)
    assert not rereads.read(key_of("b"), 1.0)
    assert rereads.read(key_of("a"), REREAD_S)
    assert not rereads.read(key_of("b"), REREAD_S + 2), "too long ago: it counts as the first"
    assert rereads.read(key_of("b"), REREAD_S + 3)
