"""Hostile payloads whose checksums are right give a corrupt block, or one of the right length. No
crash, and no index that leads out of an array: the compiled loops do not look, but here they do."""

import json

import numba
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from polling import until_deleted

from sglang_cake.codecs import entropy, groups, nonuniform, rope, zstd
from sglang_cake.codecs.block_arrays import parts_of
from sglang_cake.codecs.catalogue import chain_of, decodes_on_device, parse
from sglang_cake.codecs.codec_steps import Malformed
from sglang_cake.codecs.distributions import CLASSES
from sglang_cake.codecs.entropy import Entropy
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.codecs.pipeline import RAW_CHAIN, begin, split
from sglang_cake.core.codec_names import CODECS
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.encoded import EncodedStore
from sglang_cake.stores.link_speed import LinkSpeed
from sglang_cake.testing.codec_contract import kv_like
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import key_of

MANY = settings(
    max_examples=max(1, settings.default.max_examples // 2),
    suppress_health_check=[HealthCheck.data_too_large],
)
LAYOUTS = (
    BlockLayout.plain(2, (("k", (2, 32)), ("v", (2, 32))), "bfloat16", 64),
    BlockLayout.plain(3, (("k", (3, 8)), ("v", (1, 20))), "float32", 19),
    BlockLayout.plain(1, (("kv", (36,)),), "float16", 5),
)
CHAINS = [chain_of(codec, LAYOUTS[0], theta) for codec in CODECS for theta in (None, 10000.0)]
CHAINS += [chain.of_first() for chain in CHAINS]
LOOPS = {
    entropy: ("decode_numbers", "restore"),
    groups: ("restore",),
    nonuniform: ("restore", "put_back"),
    zstd: ("unshuffle",),
    rope: ("rotate",),
}
GUARD = b"\x11" * 64
KEY = key_of("a")


@pytest.fixture(scope="module", autouse=True)
def loops_that_look():
    """Every loop that decodes raises IndexError where it would read or write elsewhere. Numba
    has to know before it compiles, and may have compiled them already."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in LOOPS.items():
            for name in names:
                looking = numba.njit(nogil=True, boundscheck=True)(getattr(module, name).py_func)
                patch.setattr(module, name, looking)
        yield


def no_encoding(forms, tier):
    raise AssertionError("nothing is put")


async def outcome(layout, payload, *, on_device):
    """What a server's store gives for such a payload: bytes, or None for a corrupt block."""
    most = layout.block_bytes + ENCODED_HEAD_BYTES
    payload = payload[:most] or b"\0"  # the frame sees to it

    inner = MemoryStore()
    await inner.put(KEY, memoryview(payload))
    store = EncodedStore(
        *(inner, layout, no_encoding),
        link=LinkSpeed(),
        counters=Counters(),
        payload_bytes=most,
        depth=1,
        on_device=on_device,
    )
    size = most if on_device else layout.block_bytes
    memory = bytearray(GUARD + bytes(size) + GUARD)
    try:
        assert await store.get_into(KEY, memoryview(memory)[64:-64]) == size
    except BlockCorrupt as error:
        assert len(str(error)) < 10_000  # noqa: PT017 - both ways are fine
        await until_deleted(store, KEY)
        return None
    finally:
        await store.close()
        assert memory[:64] == memory[-64:] == GUARD
    return bytes(memory[64:-64])


async def check(layout, payload):
    block = await outcome(layout, payload, on_device=False)
    ready = await outcome(layout, payload, on_device=True)
    if block is None:
        return
    # What the device gets instead is a chain that it knows, of the length that this chain has.
    assert ready is not None
    text, body = split(np.frombuffer(ready, np.uint8))
    chain = parse(text)
    assert decodes_on_device(chain)
    assert chain.max_bytes(layout) <= len(body)
    if chain == RAW_CHAIN:
        assert body[: layout.block_bytes].tobytes() == block


def test_decode_kernels_under_fuzzing_check_array_bounds():
    words, places = np.zeros(64, np.uint16), np.full((1, 4, 1), 200, np.uint8)
    with pytest.raises(IndexError):
        nonuniform.put_back(words, 0, 64, 1, 16, 4, True, places, places.astype(np.uint16))


def with_text(text, body):
    """A payload of any text and body."""
    head = len(text).to_bytes(4, "little") + text
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + body


@MANY
@given(st.sampled_from(LAYOUTS), st.one_of(st.binary(max_size=300), st.binary(min_size=2000)))
@example(LAYOUTS[0], b"\xff" * 2000)
@example(LAYOUTS[0], b"")
async def test_encoded_store_random_payload_is_corrupt_or_a_whole_block(layout, payload):
    await check(layout, payload)


BYTES = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.tuples(st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x80"]), st.integers(1, 3000)).map(
        lambda drawn: drawn[0] * drawn[1]
    ),
    st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).bytes(3000)),
)


@st.composite
def damaged(draw):
    """What an encoder made of a block, with something done to it."""
    layout, chain = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(CHAINS))
    memory = memoryview(bytearray(layout.block_bytes + ENCODED_HEAD_BYTES))
    try:
        size = chain.encode(layout, memoryview(kv_like(layout, draw(st.integers(0, 3)))), memory)
    except Malformed:  # no such heads
        size = RAW_CHAIN.encode(layout, memoryview(kv_like(layout)), memory)
    payload = bytearray(memory[:size])
    text, _ = split(np.frombuffer(bytes(payload), np.uint8))
    head = -(-(4 + len(text)) // 64) * 64
    for how in draw(st.lists(st.sampled_from("oooocas"), min_size=1, max_size=3)):
        # The front, where lengths, places and classes are, as often as all the rest.
        far = st.integers(0, max(0, len(payload) - 1))
        at = draw(st.one_of(st.integers(0, head), st.integers(head, head + 1000), far))
        if how == "o":
            piece = draw(BYTES)
            payload[at : at + len(piece)] = piece[: max(0, len(payload) - at)]
        elif how == "c":
            del payload[at:]
        elif how == "a":
            payload += draw(BYTES)
        else:
            payload = payload[at:] + payload[:at]
    return layout, bytes(payload)


@MANY
@given(damaged())
async def test_encoded_store_damaged_payload_is_corrupt_or_a_whole_block(drawn):
    await check(*drawn)


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 6, 8, 9, 22, 24, 32, 100, 128, 4096, 65536, 2**63, -1, -50]),
    st.sampled_from([0.01, 0.25, 2.0, 1.5, 1e11, 10000.0, float("inf"), float("nan"), -0.0]),
    st.sampled_from([True, None, "8", [], {}]),
)
PACKS = {
    "raw": {},
    "planes": {},
    "groups": {"bits": 8, "group": 128},
    "nonuniform": {"bits": 3},
    "entropy": {"step": 0.25, "values": 2.0},
}
STEPS = PACKS | {
    "leading": {"tokens": 1},
    "unrotate": {"theta": 10000.0, "head": 4},
    "zstd": {"level": 1, "long": False},
}


@st.composite
def steps(draw, names):
    """A step with its parameters, right most of the time."""
    name = draw(st.sampled_from(sorted(names)))
    params = dict(STEPS[name])
    if params and draw(st.integers(0, 4)) == 0:
        params[draw(st.sampled_from(sorted(params)))] = draw(NUMBERS)
    if draw(st.integers(0, 19)) == 0:
        params[draw(st.sampled_from(["group", "x", "name", "__class__"]))] = draw(NUMBERS)
    return [name, params]


@st.composite
def made_up(draw):
    """A chain that nobody would make, and a body that may even fit it."""
    layout = draw(st.sampled_from(LAYOUTS))
    chain = [
        *draw(st.lists(steps(["leading"]), max_size=1)),
        *draw(st.lists(steps(["unrotate"]), max_size=2)),
        draw(steps(PACKS)),
    ]
    chain += draw(st.lists(steps(["zstd"]), max_size=1))
    if draw(st.integers(0, 4)) == 0:
        chain = draw(st.permutations([*chain, draw(steps(STEPS))]))
    text = json.dumps(chain, separators=(",", ":")).encode()
    drawn = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    try:
        known = parse(text)
        lead = drawn.bytes(known.leading_bytes(layout))
        body = drawn.bytes(known.pack.max_bytes(layout))
    except Malformed:
        return layout, with_text(text, drawn.bytes(draw(st.integers(0, layout.block_bytes))))
    if isinstance(known.pack, Entropy):  # classes that there are, and any words behind them
        sides = sum(6 * p.layers for p in parts_of(layout))
        coded = drawn.bytes(4 * draw(st.integers(0, 3000)))
        numbers = np.frombuffer(drawn.bytes(sides), np.uint8) % CLASSES
        body = bytes(8) + len(coded).to_bytes(4, "little") + numbers.tobytes() + coded
    body = lead + body
    if draw(st.integers(0, 4)) == 0:
        body = body[: draw(st.integers(0, len(body)))]
    for _ in known.compressors:
        body = zstandard.compress(body)
    return layout, with_text(text, body)


@MANY
@given(made_up())
@example((LAYOUTS[0], with_text(b"[" * 1000, b"")))
@example((LAYOUTS[0], with_text(b'{"raw":{}}', b"")))
@example((LAYOUTS[0], with_text(b"[[[],{}]]", b"")))
@example((LAYOUTS[0], with_text(b"\xff\xfe", b"")))
async def test_encoded_store_invented_chain_is_corrupt_or_a_whole_block(drawn):
    await check(*drawn)


def test_encoded_payload_head_of_the_fuzzer_equals_the_encoders():
    """What `with_text` makes is what the chain itself makes."""
    text, out = RAW_CHAIN.describe(), np.zeros(2000, np.uint8)
    assert with_text(text.encode(), b"x")[:-1] == out[: begin(text, out)].tobytes()
