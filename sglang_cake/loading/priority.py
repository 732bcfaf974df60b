"""The order in which prompts get the budget of a step, and the link.

The order is Cake's adaptive scheduling (arXiv 2410.03065, section 4, part 3), with classes, ageing,
slack, priorities and tenants as in docs/scheduling.md#the-order. All prompts age alike, so the
order of two of them changes only with their remaining times. `preempts` says when a prompt that is
being computed in chunks is interrupted between two of them.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from sglang_cake.core.keys import Span
from sglang_cake.loading.meet import View
from sglang_cake.loading.planner import Mode, Outlook

# A larger value is nearer to first come, first served; a smaller one, to the least mean time
# (benchmarks/reports/scheduling.md).
AGEING = 1 / 3

MOST_TENANTS = 4096
# Tenants whose counts fall into the same span of this many tokens are in the same round, in which
# the shortest prompt goes first. With a smaller span they would alternate at every step.
ROUND_TOKENS = 4096

# Level, tenant's round, aged remaining time, neither nearly done nor prefill due, arrival: the
# lowest goes first.
SortKey = tuple[int, int, float, bool, int]


class QueueEntry(NamedTuple):
    """A waiting prompt.

    Attributes:
        remaining_s: predicted rest of its T*; None: no block of it is being loaded.
        waited_s: time since it arrived, by a clock that all ranks share.
        compute_s: predicted time to compute the rest of it alone.
        slack_s: how long others may have the device first, if the prompt is computed alone after
            that, and its prefill must end as early as if all prompts were computed; negative: it
            is late already.
        stalled: its loads have stalled.
        loads_over: blocks of it were asked for once, and none is being loaded.
        nearly_done: its loads are over or stalled, and the rest fits one step.
        tenant_round: the round of its tenant (`TenantTokens`), lowest first; equal for all where
            tenants do not count.
        level: the level of its priority, lowest first; equal for all where priorities do not count.
        yielded: it could have had the device, and waited for its loads instead.
        prefill_due: without loads, its prefill would run by now: it was first by all priorities and
            let others go first, or it went back between two chunks. Its priority does not count
            any more.
        arrival: its number in the order of arrival; 0: not known.
    """

    rid: str
    remaining_s: float | None
    waited_s: float = 0.0
    compute_s: float = math.inf
    slack_s: float = math.inf
    stalled: bool = False
    loads_over: bool = False
    nearly_done: bool = False
    tenant_round: int = 0
    level: int = 0
    yielded: bool = False
    prefill_due: bool = False
    arrival: int = 0

    @classmethod
    def of(
        cls,
        rid: str,
        view: View,
        *,
        loads: bool,
        stalled: bool,
        outlook: Callable[[], Outlook],
        mode: Mode,
        waited_s: float,
        ever_asked: bool,
        chunk_tokens: int,
    ) -> "QueueEntry":
        """The entry of a prompt with stored blocks, as it is now.

        Args:
            loads: whether wanted blocks are being loaded now.
            stalled: as `planner.is_stalled`.
            outlook: predicts the rest of its prefill alone; called only if it is being loaded.
            ever_asked: whether any block of it was ever worth loading.
            chunk_tokens: the most that one step computes.
        """
        landed_tokens = view.attachable * view.block_tokens
        rest_tokens = view.prompt_tokens - view.front - landed_tokens
        nearly_done = ever_asked and rest_tokens <= chunk_tokens
        if not (loads and view.wanted):
            return cls(rid, None, waited_s, loads_over=ever_asked, nearly_done=nearly_done)
        now = outlook()
        stalled &= mode == "auto"
        return cls(
            rid,
            now.best_s,
            waited_s,
            compute_s=now.compute_s,
            stalled=stalled,
            nearly_done=stalled and nearly_done,
        )

    @property
    def waits_for_loads(self) -> bool:
        """Whether blocks of it are being loaded, and arrive as predicted (class 2)."""
        return self.remaining_s is not None and not self.stalled

    @property
    def only_computed(self) -> bool:
        """Whether no block of it is being loaded, or was asked for."""
        return self.remaining_s is None and not self.loads_over


def order(entries: Sequence[QueueEntry]) -> list[int]:
    """Indices into `entries`, in the order of service. Stable.

    Prompts that are only computed stay in the given order, but for those whose prefill is due. Each
    is sorted as if it had come with the last one among itself and those before it. Otherwise an old
    prompt late in the given order would pull the newer ones before it ahead of a loaded prompt.

    A prompt that is being loaded stands before the first later one with which the prompts before
    it would take more of the device than its slack.
    """
    entries = _levelled(entries)
    last: dict[tuple[int, int], tuple[float, int]] = {}

    def key_of(each: QueueEntry) -> SortKey:
        came = each.waited_s, each.arrival
        if each.only_computed and not each.prefill_due:
            group = (each.level, each.tenant_round)
            waited_s, arrival = last.get(group, came)
            came = last[group] = min(waited_s, each.waited_s), max(arrival, each.arrival)
        return _key(each, *came)

    keys = [key_of(each) for each in entries]
    ranked = sorted(range(len(entries)), key=keys.__getitem__)
    device_s = list(accumulate(_most_device_s(entries[i]) for i in ranked))
    late = {
        place
        for place, i in enumerate(ranked)
        if place and entries[i].waits_for_loads and device_s[place - 1] > entries[i].slack_s
    }
    if not late:
        return ranked
    group_places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for place, i in enumerate(ranked):
        group_places[keys[i][:2]].append(place)
    found = []  # by the place that each has, or stands before
    for places in group_places.values():
        # Larger for prompts that came later, and the same if that is not known.
        arrivals = [
            (-entries[i].waited_s, entries[i].arrival) for i in (ranked[place] for place in places)
        ]
        latest = list(accumulate(arrivals, max))
        for at, place in enumerate(places):
            before = place, True, (0.0, 0)
            if place in late and latest[at] > arrivals[at]:  # otherwise no later one is before it
                slack_s = entries[ranked[place]].slack_s
                start = bisect_left(places, bisect_right(device_s, slack_s))
                came_after = (n for n in range(start, at) if arrivals[n] > arrivals[at])
                if (first := next(came_after, None)) is not None:
                    before = places[first], False, arrivals[at]
            found.append((before, ranked[place]))
    return [i for _, i in sorted(found)]


def _most_device_s(entry: QueueEntry) -> float:
    """The most time of the device that a prompt takes, by prediction."""
    if entry.waits_for_loads and entry.remaining_s is not None:
        return entry.remaining_s
    return entry.compute_s


def preempts(waiting: QueueEntry, running: QueueEntry) -> bool:
    """Whether a waiting prompt that could compute now goes before the one that is being chunked, by
    the table of docs/scheduling.md#many-requests-and-sglangs-one."""
    running, waiting = _levelled([running, waiting])
    first = order([running, waiting])[0] == 1
    if running.waits_for_loads:
        return first
    if waiting.level != running.level:
        return first and waiting.yielded
    if waiting.only_computed or running.nearly_done:
        return False
    if waiting.nearly_done:
        return waiting.tenant_round <= running.tenant_round
    return first and waiting.tenant_round == running.tenant_round


def _levelled(entries: Sequence[QueueEntry]) -> list[QueueEntry]:
    """The entries, of which those whose prefill is due have the first level of all. SGLang does not
    interrupt a prefill for a prompt of a higher priority that comes later."""
    first = min((each.level for each in entries), default=0)
    return [each._replace(level=first) if each.prefill_due else each for each in entries]


def _key(entry: QueueEntry, waited_s: float, arrival: int) -> SortKey:
    """The place of a prompt without regard to slack, lowest first, as if it had come then."""
    remaining_s = 0.0 if entry.stalled else entry.remaining_s or 0.0
    aged_s = remaining_s - AGEING * waited_s
    first_of_its_age = entry.nearly_done or entry.prefill_due
    return entry.level, entry.tenant_round, aged_s, not first_of_its_age, arrival


class _Prefill(NamedTuple):
    """When the server of a `FcfsSchedule` computes `tokens` of a prompt.

    Attributes: least_start: the tokens before it were in the tree when the prompt arrived.
    """

    begin_s: float
    end_s: float
    tokens: Span
    least_start: int


class FcfsSchedule:
    """When a server that computes all prompts, in the order of arrival, would prefill each of them.
    Slack is measured against it (docs/scheduling.md#the-order). Not thread-safe.

    Args: cost_s: predicted time to compute tokens `[start, stop)` of a prompt alone.
    """

    def __init__(self, cost_s: Callable[[Span], float]) -> None:
        self._cost_s = cost_s
        self._prefills: dict[Hashable, _Prefill] = {}
        self._last_end_s = 0.0
        self._prefilled: set[Hashable] = set()  # since the last poll
        # Time since there was no prompt, without the time in which the real server could prefill
        # none, for example because memory was short: this server would have stood still, too.
        self._clock_s = 0.0
        self._polled_s = 0.0

    def clear(self) -> None:
        """Forget all prompts."""
        self._prefills.clear()

    def prefilled(self, prompt: Hashable) -> None:
        """The real server computes a prompt to its end. Until the next poll it counts as live."""
        self._prefilled.add(prompt)

    def slack_s(self, prompt: Hashable, compute_s: float) -> float:
        """For how long others may have the device first, if the rest of a prompt takes `compute_s`
        and its prefill must not end later than in this schedule."""
        planned = self._prefills.get(prompt)
        return (0.0 if planned is None else planned.end_s - self._clock_s) - compute_s

    def polled(
        self,
        now_s: float,
        prompts: Sequence[Hashable],
        *,
        rest: Callable[[Any], Span],
        matched: Callable[[Any], int],
        went_on: bool = True,
    ) -> None:
        """Predict the prefills of new prompts, and forget prompts that have left.

        Args:
            prompts: prompts that wait for prefill or are in it, in the order of arrival. Prompts
                that are missing, and were not `prefilled`, have been aborted.
            rest: the tokens of a new prompt that are to be computed.
            matched: how many leading tokens of a prompt the tree has, as far as that was looked for
                since it arrived.
            went_on: since the last call, a prompt was prefilled, or held back.
        """
        if went_on:
            self._clock_s += now_s - self._polled_s
        self._polled_s = now_s
        self._replan(self._prefilled.union(prompts), matched)
        self._prefilled.clear()
        self._prefills = {each: self._prefills[each] for each in prompts if each in self._prefills}
        if not self._prefills:  # the server would be idle by now; from 0, all ranks count alike
            self._clock_s = 0.0
            self._last_end_s = 0.0
        for prompt in prompts:
            if prompt not in self._prefills:
                tokens = rest(prompt)
                begin_s = max(self._last_end_s, self._clock_s)
                self._last_end_s = begin_s + self._cost_s(tokens)
                self._prefills[prompt] = _Prefill(begin_s, self._last_end_s, tokens, tokens.start)

    def _replan(self, computed: Collection[Hashable], matched: Callable[[Any], int]) -> None:
        """Take out aborted prompts, and plan what the tree has, or lacks again, of the others."""
        saved_s: dict[Hashable, float] = {}
        for prompt, planned in self._prefills.items():
            if prompt not in computed:
                saved_s[prompt] = math.inf
            elif (start := max(matched(prompt), planned.least_start)) != planned.tokens.start:
                # Negative: the tree has evicted what another prompt had brought.
                tokens = Span(start, planned.tokens.stop)
                saved_s[prompt] = self._cost_s(planned.tokens) - self._cost_s(tokens)
                self._prefills[prompt] = planned._replace(tokens=tokens)
        if not saved_s:
            return
        earlier_s = 0.0
        for prompt, planned in sorted(self._prefills.items(), key=lambda each: each[1].end_s):
            begin_s, end_s = planned.begin_s - earlier_s, planned.end_s - earlier_s
            left_s = max(0.0, end_s - max(begin_s, self._clock_s))
            own_s = min(left_s, saved_s.get(prompt, 0.0))
            self._prefills[prompt] = planned._replace(begin_s=begin_s, end_s=end_s - own_s)
            earlier_s += own_s
        self._last_end_s -= earlier_s


class TenantTokens:
    """Counts of prompt tokens by tenant. Not thread-safe.

    This is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al.,
    OSDI 2024, section 4). A tenant that comes back after a pause is lifted to the lowest count of
    the live tenants. There is no clock, so all ranks of a group count alike.
    """

    def __init__(self) -> None:
        self._paid: dict[int, int] = {}
        self._live: Counter[int] = Counter()  # requests
        self._last = 0  # count of the last tenant of which a request was live

    def __len__(self) -> int:
        """How many tenants have a count."""
        return len(self._paid)

    def arrives(self, tenant: int) -> None:
        """A request of `tenant` has arrived."""
        self._paid[tenant] = self._count(tenant)
        self._live[tenant] += 1

    def leaves(self, tenant: int) -> None:
        """A request that had arrived is over."""
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        del self._live[tenant]
        if not self._live:
            self._last = self._paid[tenant]
        if len(self._paid) > MOST_TENANTS:
            gone = [each for each in self._paid if each not in self._live]
            del self._paid[min(gone, key=self._paid.__getitem__)]

    def charge(self, tenant: int, tokens: int) -> None:
        """`tokens` were computed or loaded for a live request of `tenant`."""
        self._paid[tenant] += tokens

    def round_of(self, tenant: int) -> int:
        """The round of a tenant: rounds are served in ascending order. A tenant without a live
        request has the round in which a request that came now would be."""
        return self._count(tenant) // ROUND_TOKENS

    def _count(self, tenant: int) -> int:
        paid = self._paid.get(tenant, 0)
        if tenant in self._live:
            return paid
        return max(paid, min((self._paid[other] for other in self._live), default=self._last))
