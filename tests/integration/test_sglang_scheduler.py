"""Random requests under SGLang's own scheduler: small pools, priorities with preemption, answers
that are retracted, aborts, chunks beside requests that decode, shared prefixes, and store faults.
"""

import math
import random
import statistics
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from kv_pools import since_0_5_23
from sglang_scheduler import TOKEN, HostBlocks, Prompt, VirtualSGLang, virtual_sglang

from sglang_cake.config import CakeConfig
from sglang_cake.loading.planner import Mode
from sglang_cake.testing.virtual_gpu import BLOCK_TOKENS, LLAMA_8B, GpuModel

pytestmark = since_0_5_23

POLICIES = ("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first", "lof")


@dataclass
class Draw:
    """Requests and a server.

    Args: seed: everything else follows from it.

    Attributes:
        late_s: as of `VirtualStore`.
        options: of `virtual_sglang`.
        server: as it was after the last requests.
    """

    seed: int
    small: bool = False  # pools in which answers do not fit
    faults: bool = False
    aborts: bool = False
    retracts: bool = False
    priorities: bool = False
    shares: bool = False  # prefixes
    tiers: bool = False  # blocks are in two of them
    settings: bool = False  # orders of the queue, and a server that has just started
    model: GpuModel = field(init=False)
    prompts: list[Prompt] = field(default_factory=list)
    late_s: dict[int, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    server: VirtualSGLang = field(init=False)

    def __post_init__(self) -> None:
        chance = self._chance = random.Random(self.seed)
        self.model = replace(LLAMA_8B, chunk_tokens=chance.choice((512, 1024, 2048)))
        page = chance.choice((1, 1, 16, 64))
        pool = chance.choice((2_048, 4_096, 16_384)) if self.small else 256_000
        block_s = 10 ** chance.uniform(-1.3, 0.5) * self.block_compute_s
        self.options = {
            "link_bytes_per_s": self.model.layout.block_bytes / block_s,
            "pool_tokens": pool,
            "page": page,
            "rows": chance.choice((4, 64, 64)),
            "mixed": chance.random() < 0.3,
            "priorities": self.priorities,
            "fast_bytes_per_s": None,
            "retract_every": chance.choice((0, 3, 10)) if self.retracts else 0,
        }
        if self.tiers:
            speed = chance.choice((2, 10, 50))
            self.options["fast_bytes_per_s"] = speed * self.options["link_bytes_per_s"]
        if self.settings:
            self.options["policy"] = chance.choice(POLICIES)
            self.options["knows_costs"] = chance.random() < 0.5
            self.options["config"] = CakeConfig(
                priority=chance.choice(("adaptive", "fcfs", "fair"))
            )
        longest = min(16_000, pool // 2)
        answer = chance.choice((20, 60)) if self.small else chance.choice((1, 5, 40))
        busy, at_s = chance.choice((0.3, 0.9, 3.0)), 0.0
        for number in range(chance.randint(4, 16)):
            tokens = self._tokens(number, int(10 ** chance.uniform(2.3, math.log10(longest))))
            tokens = tokens[:longest]
            self.prompts.append(self._prompt(at_s, tokens, chance.randint(1, answer), pool))
            if chance.random() < 0.6:
                compute_s = self.model.prefill.span_s(0, len(tokens), self.model.chunk_tokens)
                at_s += chance.expovariate(busy / compute_s)
            else:
                at_s += chance.uniform(0, 0.003)
        if self.faults:
            for _ in range(chance.randint(0, 3)):
                self.late_s[chance.randrange(100)] = 10 ** chance.uniform(-3, 2)

    @property
    def block_compute_s(self) -> float:
        return self.model.prefill.span_s(0, 8192, self.model.chunk_tokens) / 64

    def _tokens(self, number: int, length: int) -> "array[int]":
        """A new document, or one that goes on from an earlier prompt or its answer."""
        chance = self._chance
        own = array("q", [100 + number, *range(1000, 999 + length)])
        if not (self.shares and self.prompts and chance.random() < 0.6):
            return own
        earlier = chance.choice(self.prompts)
        if chance.random() < 0.5:
            return earlier.tokens + array("q", [TOKEN] * (earlier.out - 1)) + own[: length // 4]
        return earlier.tokens[: chance.randint(1, len(earlier.tokens))] + own[: length // 2 + 1]

    def _prompt(self, at_s: float, tokens: "array[int]", out: int, pool: int) -> Prompt:
        chance = self._chance
        blocks = len(tokens) // BLOCK_TOKENS
        stored = list(range(chance.choice((blocks, blocks, 0, chance.randint(0, blocks)))))
        unreadable = []
        if self.faults:
            stored = [block for block in stored if chance.random() < chance.choice((1, 0.9, 0.5))]
            unreadable = [block for block in stored if chance.random() < 0.05]
        fast: list[int] = []
        if self.tiers:
            border = chance.choice((None, blocks * chance.random()))  # None: half of them
            fast = [n for n in stored if (chance.random() < 0.5 if border is None else n < border)]
            stored = [n for n in stored if n not in fast or chance.random() < 0.2]
        aborts = self.aborts and chance.random() < 0.4
        most_out = chance.choice((0, out + 1, 4 * out))
        return Prompt(
            at_s,
            tokens,
            stored=stored,
            fast=fast,
            unreadable=unreadable,
            out=out,
            most_out=most_out and min(most_out, pool - len(tokens) - 200),
            priority=chance.choice((0, 20, 40)) if self.priorities else None,
            abort_s=10 ** chance.uniform(-3.5, 0.5) if aborts else None,
        )

    def first_tokens_s(self, mode: Mode = "auto") -> list[float]:
        """Serves them, and checks what is left. Times to the first token."""
        with virtual_sglang(self.model, mode=mode, **self.options) as server:
            server.loop.store.late_s.update(self.late_s)
            server.serve(self.prompts)
            server.check_ends()
            self.server = server
            found = server.first_token_s
            return [found.get(str(number), math.nan) for number in range(len(self.prompts))]


SITUATIONS = {
    "faults": {"faults": True, "shares": True},
    "small pools": {"small": True, "shares": True},
    "small pools with retraction": {"small": True, "retracts": True, "faults": True},
    "retraction": {"retracts": True, "shares": True},
    "priorities": {"priorities": True, "small": True, "faults": True},
    "two tiers": {"tiers": True, "shares": True, "faults": True},
    "two tiers, small pools": {"tiers": True, "small": True, "retracts": True},
    "settings, small pools": {"settings": True, "small": True, "shares": True, "faults": True},
    "settings, priorities, tiers": {"settings": True, "priorities": True, "tiers": True},
    "aborts": {"aborts": True, "shares": True, "faults": True},
    "all": dict.fromkeys(("small", "faults", "aborts", "retracts", "priorities", "shares"), True),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("situation", SITUATIONS)
def test_sglang_scheduler_random_requests_end_and_hold_nothing(situation: str, seed: int) -> None:
    """And no forward reads a row of another token, nor does the store get one."""
    Draw(seed, **SITUATIONS[situation]).first_tokens_s()


def test_sglang_scheduler_draws_retract_and_preempt_and_load() -> None:
    draws = [Draw(seed, **SITUATIONS["all"]) for seed in range(8)]
    for draw in draws:
        draw.first_tokens_s()
    assert sum(draw.server.retracted for draw in draws) > 10
    assert sum(draw.server.preempted for draw in draws) > 0
    assert sum(len(draw.server.loop.store.read_s) for draw in draws) > 20


def test_sglang_scheduler_draws_load_from_both_tiers() -> None:
    for situation in ("two tiers", "two tiers, small pools"):
        draws = [Draw(seed, **SITUATIONS[situation]) for seed in range(3)]
        for draw in draws:
            draw.first_tokens_s()
        assert sum(len(draw.server.fast.read_s) for draw in draws) > 10
        assert sum(len(draw.server.loop.store.read_s) for draw in draws) > 10


def test_sglang_scheduler_wrong_stored_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    put = HostBlocks.put
    monkeypatch.setattr(HostBlocks, "put", lambda blocks, rows: put(blocks, rows + np.uint64(1)))
    with virtual_sglang(LLAMA_8B, link_bytes_per_s=1e12) as server:
        server.serve([Prompt(0.0, array("q", range(1000, 5000)), stored=range(31))])
        with pytest.raises(AssertionError, match="request 0 from"):
            server.check_ends()


@pytest.mark.parametrize("seed", range(5))
def test_sglang_scheduler_stored_prompts_are_at_most_two_steps_behind_computing(seed: int) -> None:
    """In these draws. In 120 others, 0.7 % of the prompts came later than by computing by more than
    a step and 2 %, and the worst one by 12 steps."""
    draw = Draw(seed, shares=True)
    step_s = draw.model.prefill.step_s(16_000 - draw.model.chunk_tokens, 16_000)
    auto, compute = draw.first_tokens_s(), draw.first_tokens_s("compute")
    for auto_s, compute_s in zip(auto, compute, strict=True):
        assert auto_s <= 1.02 * compute_s + 2 * step_s
    assert statistics.mean(auto) <= statistics.mean(compute)


def _asking(documents: int, tokens: int, count: int) -> list[Prompt]:
    """So many requests at once, which ask about stored documents in turn."""
    stored = range(tokens // BLOCK_TOKENS)
    return [
        Prompt(
            0.0,
            array("q", [10 + number % documents, *range(5000, 4999 + tokens), 600 + number]),
            stored=stored,
            out=5,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight"])
@pytest.mark.parametrize(
    "situation", ["one document, beside other prompts", "two, of which one fits"]
)
def test_sglang_scheduler_requests_for_one_stored_document_read_it_about_once(
    situation: str, policy: str
) -> None:
    """Each of them could read it again, and let the others go first meanwhile."""
    if situation.startswith("one"):
        asking = _asking(1, 30_000, 12)
        others = [
            Prompt(0.025 * number, array("q", [900 + number, *range(40_000, 40_999)]), out=2)
            for number in range(60)
        ]
        pool_tokens, most_reads = 640_000, 1.5 * 30_000 // BLOCK_TOKENS
    else:
        asking, others = _asking(2, 16_000, 12), []
        pool_tokens, most_reads = 24_000, 3 * 16_000 // BLOCK_TOKENS
    model = replace(LLAMA_8B, chunk_tokens=2048)
    mean_s = {}
    modes: tuple[Mode, ...] = ("auto", "compute")
    for mode in modes:
        with virtual_sglang(
            model, link_bytes_per_s=4e9, mode=mode, pool_tokens=pool_tokens, policy=policy
        ) as server:
            server.serve([*asking, *others])
            server.check_ends()
            first_s = [server.first_token_s[str(number)] for number in range(len(asking))]
            mean_s[mode] = statistics.mean(first_s)
            if mode == "auto":
                assert len(server.loop.store.read_s) <= most_reads
    assert mean_s["auto"] <= 0.8 * mean_s["compute"]


@dataclass
class FewDocuments:
    """Requests for two to four stored documents, of which a KV pool holds one to three.

    Args: seed: everything else follows from it.

    Attributes:
        asking: these requests.
        others: prompts that are not stored.
        options: of `virtual_sglang`.
    """

    seed: int
    asking: list[Prompt] = field(default_factory=list)
    others: list[Prompt] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chance = random.Random(10_000 + self.seed)
        documents = chance.choice((2, 2, 3, 4))
        count = chance.randint(5, 40)
        sizes = [chance.choice((4000, 8000, 16_000, 30_000, 50_000)) for _ in range(documents)]
        spread_s = chance.choice((0, 0.5, 3.0, 8.0))
        for number in range(count):
            document = chance.randrange(documents)
            own = array("q", [600 + number]) * chance.choice((20, 20, 200, 1000))
            size = sizes[document]
            stored = range(int(size // BLOCK_TOKENS * chance.choice((1, 1, 1, 0.6))))
            tokens = array("q", [10 + document, *range(5000, 4999 + size)]) + own
            at_s = chance.random() * spread_s
            self.asking.append(Prompt(at_s, tokens, stored, out=chance.choice((1, 5, 50, 200))))
        others, every_s = chance.choice((0, 20, 60)), chance.choice((0.02, 0.1, 0.3))
        size = chance.choice((200, 1000, 5000, 12_000))
        for number in range(others):
            tokens = array("q", [900 + number, *range(52_000, 51_999 + size)])
            at_s = 0.0005 + number * every_s
            self.others.append(Prompt(at_s, tokens, out=chance.choice((2, 40))))
        pool_tokens = int(max(sizes) * chance.choice((1.1, 1.5, 2.2, 3.2)))
        self.options = {
            "pool_tokens": max(pool_tokens, size) + 4000,
            "link_bytes_per_s": chance.choice((1e9, 2e9, 4e9, 10e9, 25e9)),
            "policy": chance.choice(("fcfs", "lpm", "dfs-weight")),
            "rows": chance.choice((16, 64)),
        }

    def mean_s(self, mode: Mode) -> float:
        """Time to first token of the requests for documents."""
        model = replace(LLAMA_8B, chunk_tokens=2048)
        with virtual_sglang(model, mode=mode, **self.options) as server:
            server.serve([*self.asking, *self.others])
            server.check_ends()
            count = len(self.asking)
            return statistics.mean(server.first_token_s[str(number)] for number in range(count))


@pytest.mark.parametrize("seed", [16, 26, 47, 53])
def test_sglang_scheduler_documents_that_do_not_fit_the_pool_are_no_later_than_by_computing(
    seed: int,
) -> None:
    """In these draws. Of the first 60, one mean is 1.18 times that of computing, and half are below
    0.50. If waiting prompts did not follow the tree, and SGLang's policies by prefix did not keep
    their order, 13 would be later, one 11 times."""
    draw = FewDocuments(seed)
    assert draw.mean_s("auto") <= draw.mean_s("compute")


@pytest.mark.parametrize(
    ("tokens", "link_bytes_per_s", "share"),
    [(1_500, 5e9, 1.0), (1_500, 10e9, 0.9), (4_000, 10e9, 0.7), (16_000, 5e9, 0.6)],
)
def test_sglang_scheduler_prefill_decode_interval_makes_no_hit_slower_than_a_miss(
    tokens: int, link_bytes_per_s: float, share: float
) -> None:
    """After each step of the prompt, requests decode for 140 ms. A chunk has 8,192 tokens."""
    decoding = [
        Prompt(0.0, array("q", range(start, start + 40)), out=150)
        for start in range(200_000, 1_000_000, 100_000)
    ]
    prompt = array("q", range(1000, 1000 + tokens))
    hit = Prompt(0.6, prompt, stored=range(tokens // BLOCK_TOKENS))
    took_s = {}
    modes: tuple[Mode, ...] = ("auto", "compute")
    for mode in modes:
        with virtual_sglang(LLAMA_8B, link_bytes_per_s=link_bytes_per_s, mode=mode) as server:
            server.prefill_decode_interval = 22
            server.serve([*decoding, hit])
            took_s[mode] = server.first_token_s[str(len(decoding))]
    assert took_s["auto"] <= share * took_s["compute"] + 1e-3


@pytest.mark.parametrize(
    ("interval", "first", "second", "link_bytes_per_s"),
    [(22, 4000, 1500, 5e9), (100, 4000, 1500, 5e9), (22, 4000, -4000, 20e9)],
)
def test_sglang_scheduler_prefill_decode_interval_lets_a_later_prompt_share_a_last_step(
    interval: int, first: int, second: int, link_bytes_per_s: float
) -> None:
    """Args: second: tokens; negative: nothing of it is stored."""
    decoding = [
        Prompt(0.0, array("q", range(start, start + 40)), out=150)
        for start in range(200_000, 1_000_000, 100_000)
    ]
    prompts = [
        Prompt(0.6, array("q", range(1000, 1000 + first)), stored=range(first // BLOCK_TOKENS)),
        Prompt(
            0.601,
            array("q", range(10_000, 10_000 + abs(second))),
            stored=range(max(0, second) // BLOCK_TOKENS),
        ),
    ]
    took_s = {}
    modes: tuple[Mode, ...] = ("auto", "compute")
    for mode in modes:
        with virtual_sglang(LLAMA_8B, link_bytes_per_s=link_bytes_per_s, mode=mode) as server:
            server.prefill_decode_interval = interval
            server.serve([*decoding, *prompts])
            ids = range(len(decoding), len(decoding) + len(prompts))
            took_s[mode] = [server.first_token_s[str(each)] for each in ids]
    pairs = zip(took_s["auto"], took_s["compute"], strict=True)
    assert all(auto_s <= compute_s + 1e-3 for auto_s, compute_s in pairs)


def _drops_for_length(server: VirtualSGLang) -> None:
    server.max_queued_requests = 1000


def _is_prefill_server(server: VirtualSGLang) -> None:
    server.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])


@pytest.mark.parametrize("setting", [_drops_for_length, _is_prefill_server])
@pytest.mark.parametrize(("tokens", "stored_tokens"), [(1500, 1499), (60_000, 20_000)])
def test_sglang_scheduler_stored_prompt_waits_for_no_prefill_that_cannot_be_interrupted(
    setting: Callable[[VirtualSGLang], None], tokens: int, stored_tokens: int
) -> None:
    prompt = array("q", range(1000, 1000 + tokens))
    first = Prompt(0.0, prompt, stored=range(stored_tokens // BLOCK_TOKENS))
    long = Prompt(0.001, array("q", range(500_000, 560_000)))
    took_s = {}
    modes: tuple[Mode, ...] = ("auto", "compute")
    for mode in modes:
        with virtual_sglang(LLAMA_8B, link_bytes_per_s=25e9, mode=mode) as server:
            setting(server)
            server.serve([first, long])
            took_s[mode] = server.first_token_s
    assert took_s["auto"]["0"] <= took_s["compute"]["0"]
    assert took_s["auto"]["1"] <= took_s["compute"]["1"]


def test_sglang_scheduler_lookup_lets_no_prefill_that_cannot_be_interrupted_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The later prompt has no keys, so it waits for no lookup, and does not go back."""
    first = Prompt(0.0, array("q", range(1000, 2500)))
    later = Prompt(0.0, array("q", range(5000, 65000)))
    took_s = []
    for without_keys in ({"0", "1"}, {"1"}):
        with virtual_sglang(LLAMA_8B, link_bytes_per_s=25e9) as server:
            keys = server.loop.coordinator.keys
            chain = keys.chain

            def some(req: Any, chain: Any = chain, none: set[str] = without_keys) -> Any:
                return None if req.rid in none else chain(req)

            monkeypatch.setattr(keys, "chain", some)
            server.serve([first, later])
            took_s.append(server.first_token_s["0"])
    lookup_s = 0.002
    assert took_s[1] <= took_s[0] + lookup_s
