"""Blocks in and out of SGLang's own pools, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kv_pools import (
    as_bytes,
    buffers_for,
    buffers_of,
    deepseek_v4,
    deepseek_v41,
    dsa,
    fp4,
    hnd,
    hybrid,
    mha,
    minimax,
    mla,
    mxfp8,
    nvfp4,
    nvfp4_rows,
    pooled_dsa,
    qsa,
    rows_of,
    scramble,
    slots_in_pages,
    states_of,
    windows,
)

from sglang_cake.core.codec_names import namespace_value
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.keys import BlockKey, Namespace
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.stores.open_store import open_blocks, parse_sources

SLOTS, BLOCK = 96, 16
SCATTERED = slots_in_pages(SLOTS, 1, seed=3)
# The slots of four blocks: two to save, two to load.
ORDERS = {
    "in_runs": [*range(3, 3 + BLOCK), *range(60, 60 + BLOCK), *range(20, 20 + 2 * BLOCK)],
    "swapped": [3, 5, 4, *range(6, 3 + 2 * BLOCK), 50, 51, 53, 52, *range(54, 50 + 2 * BLOCK)],
    "backwards": [*range(4 * BLOCK, 0, -1)],
}


async def test_kv_pool_block_that_memory_lends_behind_a_codec_is_copied_bit_exact() -> None:
    """It does not begin on a page: the head of its payload stands before it."""
    source, target = mha(SLOTS, dtype=torch.bfloat16), mha(SLOTS, dtype=torch.bfloat16)
    scramble(source, 1)
    scramble(target, 2)
    kv_out, kv_in = DeviceKV(source, block_tokens=BLOCK), DeviceKV(target, block_tokens=BLOCK)
    taken, given = SCATTERED[: 2 * BLOCK].split(BLOCK)
    (block,) = buffers_for(kv_out, 1)
    kv_out.save(taken, [block], kv_out.fence()).wait()
    key = BlockKey(bytes(32))
    namespace = Namespace((("codec", namespace_value("auto", 0.0)),))
    store = open_blocks(
        parse_sources("memory://1MB"), [namespace], kv_out.layout, codec="auto", depth=1
    )
    await store.put(key, block.view)
    lent = store.lend(key)
    assert lent is not None
    assert kv_in.load(lent.buffer, given, kv_in.fence()).done()
    lent.release()
    await store.close()
    for a, b in zip(buffers_of(source), buffers_of(target), strict=True):
        assert torch.equal(as_bytes(b)[given], as_bytes(a)[taken])


def unequal() -> Any:
    pool = mha(SLOTS)
    pool.v_buffer[1] = torch.zeros(SLOTS + 1, 2, 5)
    return pool


@dataclass(frozen=True, slots=True)
class Case:
    """A pool, the tokens of its pages and of a block, and what of it is stored otherwise."""

    make: Callable[[], Any]
    page: int
    block: int
    apart: Callable[[Any], tuple[object, ...]] = lambda pool: ()

    def kv(self, pool: Any) -> DeviceKV:
        return DeviceKV(pool, block_tokens=self.block, apart=self.apart(pool))


PLAIN = {  # among them rows of words of 8, 4, 2 and 1 bytes
    "mha, 32 bits": Case(lambda: mha(SLOTS), 1, BLOCK),
    "mha, 8 bits": Case(lambda: mha(SLOTS, dtype=torch.float8_e5m2), 1, BLOCK),
    "narrow values": Case(lambda: mha(SLOTS, dim=6, v_dim=4, dtype=torch.float16), 1, BLOCK),
    "an odd number of bytes": Case(
        lambda: mha(SLOTS, heads=1, dim=3, dtype=torch.float8_e4m3fn), 1, BLOCK
    ),
    "mla, 32 bits": Case(lambda: mla(SLOTS), 1, BLOCK),
    "mla, 16 bits": Case(lambda: mla(SLOTS, dtype=torch.bfloat16), 1, BLOCK),
}
CASES = PLAIN | {
    "unequal layers": Case(unequal, 1, BLOCK),
    "dsa": Case(lambda: dsa(512), 64, 128),
    "dsa, a page a block": Case(lambda: dsa(512), 64, 64),
    "dsa, a layer without an index": Case(
        lambda: dsa(512, skip_topk_layers=[True, False, True]), 64, 128
    ),
    "dsa, packed": Case(lambda: dsa(512, dtype=torch.float8_e4m3fn, kv_cache_dim=656), 64, 128),
    "dsa, a pooled index": Case(lambda: pooled_dsa(512), 128, 256),
    "minimax": Case(lambda: minimax(512), 64, 128),
    "minimax, 8 bits beside 16": Case(
        lambda: minimax(512, dtype=torch.float8_e4m3fn, index_dtype=torch.bfloat16), 64, 128
    ),
    "minimax, 4 bits": Case(lambda: nvfp4(512), 128, 128),
    "4 bits with scales": Case(lambda: fp4(SLOTS), 1, BLOCK),
    "4 bits with scales, mla": Case(lambda: fp4(SLOTS, mla=True), 1, BLOCK),
    "4 bits with scales in rows and in pages": Case(
        lambda: nvfp4_rows(512, prefill="flashinfer"), 64, 128
    ),
    "8 bits with scales in pages": Case(lambda: mxfp8(512), 128, 128),
    "pages of heads": Case(lambda: hnd(512), 16, 64),
    "deepseek v4": Case(lambda: deepseek_v4(2048), 256, 512, states_of),
    "deepseek v4.1": Case(lambda: deepseek_v41(2048), 256, 512, states_of),
    "full attention beside windows": Case(
        lambda: windows(SLOTS), 1, BLOCK, lambda pool: (pool.swa_kv_pool,)
    ),
    "windows": Case(lambda: windows(2 * SLOTS).swa_kv_pool, 1, BLOCK),
    "full attention beside states": Case(lambda: hybrid(512), 64, 128),
    "qsa": Case(lambda: qsa(512), 64, 128),
}


@dataclass(slots=True)
class Moved:
    """Two blocks of a pool with random bytes, in other slots of another one."""

    source: Any
    target: Any
    taken: torch.Tensor
    given: torch.Tensor
    before: list[torch.Tensor]

    @classmethod
    def by(cls, case: Case, slots: torch.Tensor | None = None) -> "Moved":
        """Args: slots: of two blocks to save and, at the end, two to load; None: scattered."""
        source, target = case.make(), case.make()
        scramble(source, 1)
        scramble(target, 2)
        before = [as_bytes(b).clone() for b, _ in rows_of(target)]
        kv_out, kv_in = case.kv(source), case.kv(target)
        assert kv_out.layout == kv_in.layout
        size = 2 * case.block
        slots = slots_in_pages(source.size, case.page, seed=3) if slots is None else slots
        taken, given = slots[:size], slots[-size:]
        blocks = buffers_for(kv_out, 2)
        saved = kv_out.save(taken, blocks, kv_out.fence())
        saved.wait()
        assert saved.done()
        for block, part in zip(blocks, given.split(case.block), strict=True):
            assert kv_in.load(block, part, kv_in.fence()).done()
        return cls(source, target, taken, given, before)

    def wrong(self) -> list[int]:
        """The planes whose rows are not those of the source, or changed elsewhere."""
        found = []
        pairs = zip(rows_of(self.source), rows_of(self.target), self.before, strict=True)
        for number, ((a, tokens), (b, _), old) in enumerate(pairs):
            taken, given = self.taken[::tokens] // tokens, self.given[::tokens] // tokens
            others = torch.ones(len(b), dtype=torch.bool)
            others[given] = False
            if not torch.equal(as_bytes(b)[given], as_bytes(a)[taken]) or not torch.equal(
                as_bytes(b)[others], old[others]
            ):
                found.append(number)
        return found


@pytest.mark.parametrize("kind", CASES)
def test_kv_pool_block_round_trip_is_bit_exact_and_changes_no_other_slot(kind: str) -> None:
    moved = Moved.by(CASES[kind])
    assert moved.wrong() == []
    for number, (rows, tokens) in enumerate(rows_of(moved.target)):
        # The control: in each plane, one row of another token.
        one, other = (moved.given[at] // tokens for at in (0, -1))
        raw = as_bytes(rows)
        right = raw[one].clone()
        raw[one] = raw[other]
        assert moved.wrong() == [number]
        raw[one] = right


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["narrow values", "an odd number of bytes", "mla, 16 bits"])
def test_kv_pool_slots_in_any_order_are_copied_bit_exact(kind: str, order: str) -> None:
    assert Moved.by(CASES[kind], torch.tensor(ORDERS[order])).wrong() == []


def index_of(pool: Any, layer: int, slots: torch.Tensor) -> torch.Tensor:
    """The index keys and scales of tokens as SGLang's kernels find them: in the page of a slot, the
    keys of all its tokens come before their scales. `[tokens, 128 + 4]`."""
    pages = pool.index_key_cache.get_local_buffer(layer)[slots // 64]
    keys = pages[:, : 64 * 128].view(-1, 64, 128)
    scales = pages[:, 64 * 128 :].view(-1, 64, 4)
    row = torch.arange(len(slots))
    return torch.cat((keys[row, slots % 64], scales[row, slots % 64]), dim=1)


def test_kv_pool_index_keys_move_with_their_tokens() -> None:
    moved = Moved.by(CASES["dsa"])
    for layer in range(3):
        wanted = index_of(moved.source, layer, moved.taken)
        assert torch.equal(index_of(moved.target, layer, moved.given), wanted)
        assert not torch.equal(index_of(moved.target, layer, moved.given.roll(1)), wanted)


@pytest.mark.parametrize("kind", CASES)
def test_kv_pool_layout_describes_the_bytes_of_a_block(kind: str) -> None:
    case = CASES[kind]
    pool = case.make()
    scramble(pool, 1)
    kv = case.kv(pool)
    (block,) = buffers_for(kv, 1)
    assert len(block.view) == kv.layout.block_bytes
    slots = torch.arange(case.page, case.page + case.block)
    kv.save(slots, [block], ()).wait()
    # Planes one after the other, each row by row: as `layout` promises to every reader.
    planes = [bytes(as_bytes(b)[slots[::n] // n].numpy()) for b, n in rows_of(pool)]
    if kind != "unequal layers":  # they are in groups
        assert bytes(block.view) == b"".join(planes)
    assert sorted(len(p) for p in planes) == sorted(p.rows * p.row_bytes for p in kv.layout.planes)


# A target, its draft models, the tokens of a page and of a block.
DRAFTS: dict[str, tuple[Callable[[], Any], list[Callable[[], Any]], int, int]] = {
    "STANDALONE": (lambda: mha(SLOTS), [lambda: mha(SLOTS, heads=1, layers=1)], 1, BLOCK),
    "DFLASH": (lambda: mha(SLOTS), [lambda: mha(SLOTS, heads=1, layers=3)], 1, BLOCK),
    "EAGLE3 of another dtype": (
        lambda: mha(SLOTS, dtype=torch.float8_e4m3fn),
        [lambda: mha(SLOTS, dtype=torch.bfloat16, layers=1)],
        1,
        BLOCK,
    ),
    "EAGLE3 of an MLA model": (lambda: mla(SLOTS), [lambda: mha(SLOTS, layers=1)], 1, BLOCK),
    "MTP of an MLA model": (lambda: mla(SLOTS), [lambda: mla(SLOTS, layers=1)], 1, BLOCK),
    "MTP with an index": (lambda: dsa(512), [lambda: dsa(512, layer_num=1)], 64, 128),
    "MTP of a hybrid": (lambda: hybrid(512), [lambda: mha(512, page=64, layers=1)], 64, 128),
    "MTP in pages": (
        lambda: mha(512, page=64),
        [lambda: mha(512, page=64, layers=1)] * 2,
        64,
        128,
    ),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_kv_pool_block_round_trip_brings_the_rows_of_draft_models(kind: str) -> None:
    make, makes, page, block_tokens = DRAFTS[kind]
    sides = []
    for seed in (1, 2):
        pools = [make(), *(make_draft() for make_draft in makes)]
        for pool in pools:
            scramble(pool, seed)
        kv = DeviceKV(pools[0], block_tokens=block_tokens, drafts=pools[1:])
        sides.append(([rows for pool in pools for rows in rows_of(pool)], kv))
    (source, kv_out), (target, kv_in) = sides
    assert kv_out.layout == kv_in.layout
    assert kv_out.layout != DeviceKV(make(), block_tokens=block_tokens).layout
    names = {name for group in kv_out.layout.groups for name, _ in group.parts}
    assert {name.startswith("draft_") for name in names} == {True, False}
    slots = slots_in_pages(SLOTS if page == 1 else 512, page, seed=3)
    taken, given = slots[:block_tokens], slots[-block_tokens:]
    (block,) = buffers_for(kv_out, 1)
    kv_out.save(taken, [block], ()).wait()
    kv_in.load(block, given, ())
    for (a, tokens), (b, _) in zip(source, target, strict=True):
        moved = as_bytes(a)[taken[::tokens] // tokens]
        assert torch.equal(as_bytes(b)[given[::tokens] // tokens], moved)
        assert not torch.equal(moved.roll(1, 0), moved)  # the control: other rows are found


def test_kv_pool_draft_model_with_fewer_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cake cannot store the KV of a draft model [^\n]+$"):
        DeviceKV(mha(SLOTS), block_tokens=BLOCK, drafts=[mha(SLOTS - 1)])


def test_kv_pool_fp8_layout_keeps_its_dtype_name() -> None:
    pool = mha(32, dtype=torch.float8_e4m3fn)
    assert pool.k_buffer[0].dtype is torch.uint8
    assert DeviceKV(pool, block_tokens=BLOCK).layout.groups[0].dtype == "float8_e4m3fn"


@pytest.mark.parametrize("block_tokens", [32, 96])
def test_kv_pool_blocks_that_end_inside_of_a_page_are_refused(block_tokens: int) -> None:
    with pytest.raises(ConfigError, match="set --cake-block-tokens 64"):
        DeviceKV(dsa(512), block_tokens=block_tokens)


def test_kv_pool_counts_slots_and_not_rows() -> None:
    assert DeviceKV(mha(32), block_tokens=BLOCK).slots == 33
    assert DeviceKV(nvfp4(512), block_tokens=128).slots == 512 + 128
