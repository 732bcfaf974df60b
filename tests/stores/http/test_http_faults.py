"""Servers that are down, slow or lying: an error of the store's, soon, and never a wrong block."""

import asyncio
import contextlib
import gzip
import json
import re
import time

import pytest
from bad_server import bad_server
from http_servers import FRAMED_BYTES, TOKEN, A, B, framed, opened
from polling import async_answer, async_until

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreFull, StoreUnavailable
from sglang_cake.core.keys import Namespace
from sglang_cake.stores.base import EvictionCounts, RequestFacts, StoreStats
from sglang_cake.stores.circuit_breaker import FAILURES, LAST_S, AdaptiveTimeout
from sglang_cake.stores.http.http_store import (
    ASK_AGAIN_FIRST_S,
    ASK_AGAIN_LAST_S,
    HEAD_ROUNDS,
    HEADS_AT_ONCE,
)
from sglang_cake.stores.http.http_transport import MAX_RETRY_AFTER_S, TRIES, Busy
from sglang_cake.stores.http.protocol import (
    KEY_BYTES,
    MAX_ANSWER_BYTES,
    block_path,
    touched_path,
    write_stats,
)
from sglang_cake.testing.store_contract import FRAME, LAYOUT, block_of, key_of, read

GOOD = framed("a")
LOOKUP_S = 5.0  # how long a lookup may take, in the test of a slow description


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


clock = Clock()


@contextlib.asynccontextmanager
async def client_and_server(answer, **kwargs):
    """A client, and its server, which does `answer(asked)`. The clock of the client's breaker
    stands still until the test moves it on, so that no probe comes unexpected."""
    clock.now_s = 0.0
    async with bad_server(answer) as server:
        store = opened(server.base, clock=clock, **kwargs)
        try:
            yield store, server
        finally:
            await store.close()


async def get_a(store):
    return await read(store, A)


def flipped(at):
    wrong = bytearray(GOOD)
    wrong[at] ^= 1
    return bytes(wrong)


UNTIL_CLOSED = "HTTP/1.1 200 x\r\nConnection: close\r\n\r\n"


async def ends_early(asked):
    asked.send(UNTIL_CLOSED.encode() + GOOD[:-1])
    asked.end()


def answers(status, body=b"", **kwargs):
    async def answer(asked):
        asked.answer(status, body, **kwargs)

    return answer


OTHER_FRAME = BlockFrame(Namespace((("model", "other"),)), LAYOUT)
LIES = {
    "a bit of the header is wrong": answers(200, flipped(100)),
    "a bit of the first payload byte is wrong": answers(200, flipped(HEADER_BYTES)),
    "the block of another namespace": answers(200, framed("a", frame=OTHER_FRAME)),
    "nothing": answers(200),
    "a page for people": answers(200, b"<html>Welcome</html>"),
    "it ends early without having named a length": ends_early,
    "compressed": answers(200, gzip.compress(GOOD), headers="Content-Encoding: gzip\r\n"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_http_store_wrong_block_bytes_are_corrupt_and_reported(lie):
    async with client_and_server(lie) as (store, server):
        with pytest.raises(BlockCorrupt):
            await get_a(store)
        # A lie is not asked for again, and the server is told of it.
        await async_until(lambda: len(server.asked) > 1)
        assert [asked.method for asked in server.asked] == ["GET", "POST"]
        assert store.counters.corrupt == 1


async def test_http_store_answer_longer_than_its_length_is_an_error():
    async with client_and_server(answers(200, GOOD, length=FRAMED_BYTES - 1)) as (store, _):
        with pytest.raises((BlockCorrupt, StoreUnavailable)) as error:  # whatever comes first
            await get_a(store)
        assert len(str(error.value)) < 500


def checking(checked, told):
    """A corrupt block until `checked` is set, when reports are answered. Lookups are answered when
    `told` is set: every block is there."""

    async def answer(asked):
        if asked.method == "GET":
            asked.answer(200, GOOD if checked.is_set() else flipped(-1))
        elif "contains" in asked.path:
            await told.wait()
            asked.answer(200, bytes([1]) * (len(asked.body) // KEY_BYTES))
        else:
            await checked.wait()
            asked.answer(204)

    return answer


async def test_http_store_lookup_that_began_during_a_report_says_missing_after_it():
    """Its answer may be older than the report."""
    checked, told = asyncio.Event(), asyncio.Event()
    async with client_and_server(checking(checked, told)) as (store, server):
        with pytest.raises(BlockCorrupt):
            await get_a(store)
        lookup = asyncio.ensure_future(store.contains([A]))
        await async_until(lambda: [asked.method for asked in server.asked].count("POST") == 2)
        checked.set()
        with pytest.raises(BlockMissing):
            await get_a(store)
        while [asked.method for asked in server.asked].count("GET") == 1:  # the report goes on
            with contextlib.suppress(BlockMissing):
                await get_a(store)
            await asyncio.sleep(0)
        told.set()
        assert await lookup == [False]


async def test_http_store_corrupt_block_is_missing_while_it_is_reported():
    """The reader goes on, however long the server takes to check its copy."""
    checked, told = asyncio.Event(), asyncio.Event()
    told.set()
    async with client_and_server(checking(checked, told)) as (store, server):
        with pytest.raises(BlockCorrupt):
            await get_a(store)
        with pytest.raises(BlockMissing):
            await get_a(store)
        assert await store.contains([A, B]) == [False, True]
        put = asyncio.ensure_future(store.put(A, block_of("a")))  # after the report
        await async_until(lambda: [asked.method for asked in server.asked].count("POST") == 2)
        assert "PUT" not in [asked.method for asked in server.asked]
        checked.set()
        with pytest.raises(StoreUnavailable):  # it is no server for puts
            await put
        assert await get_a(store) == block_of("a")


async def resets_at_once(asked):
    asked.reset()


async def resets_in_the_middle(asked):
    asked.answer(200, GOOD[: FRAMED_BYTES // 2], length=FRAMED_BYTES)
    await asked.writer.drain()
    asked.reset()


async def ends_in_the_middle(asked):
    asked.answer(200, GOOD[: FRAMED_BYTES // 2], length=FRAMED_BYTES)
    asked.end()


async def talks_nonsense(asked):
    asked.send(b"\x16\x03\x01 this is not HTTP\r\n\r\n" * 10)
    asked.end()


async def endless_headers(asked):
    asked.send(b"HTTP/1.1 200 x\r\n")
    while not asked.writer.transport.is_closing():
        asked.send(b"X-More: " + b"x" * 1000 + b"\r\n")
        await asked.writer.drain()


TROUBLE = {
    "500": answers(500),
    "503": answers(503),
    "reset": resets_at_once,
    "reset in the middle": resets_in_the_middle,
    "end in the middle": ends_in_the_middle,
    "nonsense": talks_nonsense,
    "endless headers": endless_headers,
}


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE.keys())
async def test_http_store_passing_fault_is_hidden_by_retries(trouble):
    async def answer(asked):
        if len(gone) < 2:
            gone.append(1)
            await trouble(asked)
        else:
            asked.answer(200, GOOD)

    gone = []
    async with client_and_server(answer) as (store, _):
        assert await get_a(store) == block_of("a")
        assert store.counters.failures >= 1
        assert store.counters.breaker_openings == 0


async def silent(asked):
    pass


async def stops_in_the_middle(asked):
    asked.answer(200, GOOD[: FRAMED_BYTES // 2], length=FRAMED_BYTES)


@pytest.mark.parametrize("slow", [silent, stops_in_the_middle])
async def test_http_store_silent_server_times_out_without_a_retry(slow):
    async with client_and_server(slow, first_s=0.2, floor_s=0.1) as (store, server):
        with pytest.raises(StoreUnavailable):
            await get_a(store)
        assert store.counters.timeouts == 1
        assert store.counters.requests == 1
        assert len(server.asked) <= 1  # none: given up before the server had read it


async def test_http_store_silent_server_gets_longer_timeouts_until_it_answers():
    """No limit loses data for ever: each one that was too short makes the next one longer."""

    async def answer(asked):
        if len(limits_s) == 2:
            asked.answer(200, GOOD)

    limits_s = []
    async with client_and_server(answer, first_s=0.1, floor_s=0.05) as (store, _):
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as failure:
                await get_a(store)
            limits_s += re.findall(r"no whole answer in ([\d.]+) s", str(failure.value))
            assert store.counters.timeouts == len(limits_s)
        assert limits_s == ["0.1", "0.2"]
        assert await async_answer(lambda: get_a(store)) == block_of("a")  # 0.4 s are little


async def test_http_store_retry_after_header_is_honoured_up_to_a_bound():
    async def answer(asked):
        times.append(time.monotonic())
        if len(times) == 1:
            asked.answer(503, headers="Retry-After: 99999\r\n")  # nobody waits that long
        else:
            asked.answer(200, GOOD)

    times = []
    async with client_and_server(answer) as (store, _):
        assert await get_a(store) == block_of("a")
        assert store.counters.retries == 1
        assert times[1] - times[0] >= MAX_RETRY_AFTER_S - 0.01


async def test_http_store_puts_that_the_server_has_no_place_for_are_no_failures():
    async def answer(asked):
        if asked.method == "PUT" and asked.path == block_path(FRAME.digest, A):
            asked.answer(503, headers="Retry-After: 1\r\n")
        else:
            asked.answer(204 if asked.method == "PUT" else 404)

    async with client_and_server(answer, depth=2 * FAILURES) as (store, _):
        puts = [store.put(A, block_of("a")) for _ in range(2 * FAILURES)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(result) for result in results] == [Busy] * len(puts)
        assert store.counters.retries == len(puts) * (TRIES - 1)
        assert store.counters.failures == store.counters.refused == 0


@pytest.mark.parametrize("status", [204, 206, 301, 302, 304, 307, 400, 401, 403, 429])
async def test_http_store_unexpected_status_is_unavailable_and_not_followed(status):
    async def answer(asked):
        asked.answer(status, headers=f"Location: {asked.path}x\r\n")

    async with client_and_server(answer, token=TOKEN) as (store, server):
        with pytest.raises(StoreUnavailable, match=str(status)):
            await get_a(store)
        assert [asked.path for asked in server.asked] == [block_path(FRAME.digest, A)]
        assert server.asked[0].headers["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("status", [404, 410])
async def test_http_store_missing_block_counts_as_no_failure(status):
    async with client_and_server(answers(status, b"no such block\n")) as (store, server):
        for _ in range(10):
            with pytest.raises(BlockMissing):
                await get_a(store)
        assert store.counters.failures == 0
        assert server.connections == 1


async def test_http_store_server_error_text_is_short_and_printable():
    async with client_and_server(answers(403, b"denied\r\n\x1b[2J\0" + b"x" * 10_000)) as (
        store,
        _,
    ):
        with pytest.raises(StoreUnavailable) as error:
            await get_a(store)
        assert "denied" in str(error.value)
        assert len(str(error.value)) < 500
        assert str(error.value).isprintable()


NO_ANSWERS = {
    "one too few": b"\1",
    "one too many": b"\1\0\1",
    "another byte": b"\1\2",
    "text": b"10",
    "megabytes": b"\1" * (1 << 20),
    "nothing": b"",
}


@pytest.mark.parametrize("body", NO_ANSWERS.values(), ids=NO_ANSWERS.keys())
async def test_http_store_malformed_lookup_answer_is_unavailable(body):
    async with client_and_server(answers(200, body)) as (store, server):
        with pytest.raises(StoreUnavailable):
            await store.contains([A, B])
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b'{"blocks": "many"}', b"[" * 100_000, b"\xff"], ids=repr
)
async def test_http_store_malformed_stats_are_unavailable(body):
    async with client_and_server(answers(200, body)) as (store, _):
        with pytest.raises(StoreUnavailable):
            await store.stats()


async def test_http_store_stats_have_no_evictions_of_the_server():
    """They are no work of this process, and each client would count them."""
    stats = StoreStats(blocks=7, evictions=EvictionCounts(4096, 2, 17, 3), policy="lru")
    body = json.dumps(write_stats(stats)).encode()
    async with client_and_server(answers(200, body)) as (store, _):
        assert await store.stats() == StoreStats(blocks=7, policy="lru")


async def test_http_store_stats_that_fail_stop_no_lookup_and_are_asked_for_less_often():
    """As of an older server, which has none while it builds its index."""

    async def answer(asked):
        ok = "contains" in asked.path
        asked.answer(200 if ok else 503, b"\1" if ok else b"no index")

    async with client_and_server(answer) as (store, server):
        for _ in range(2 * FAILURES):
            with pytest.raises(StoreUnavailable):
                await store.stats()
        assert len(server.asked) == FAILURES
        assert await store.contains([A]) == [True]


async def test_http_store_stats_above_the_size_limit_are_unavailable():
    async with client_and_server(answers(200, b" " * (MAX_ANSWER_BYTES + 1))) as (store, _):
        with pytest.raises(StoreUnavailable, match="more than"):
            await store.stats()


async def listed(store, keys):
    async for block in store.list_blocks():
        keys.append(block.key)


LINE = b'{"key": "%s", "bytes": 9, "used_s": null}\n' % A.hex().encode()
BAD_LISTS = {
    "no key": b'{"bytes": 9, "used_s": null}\n',
    "a short key": LINE.replace(A.hex().encode(), b"ab"),
    "no object": b"7\n",
    "broken off within a line": LINE + LINE[:-1],
    "an endless line": b"x" * 100_000,
    "infinite": LINE.replace(b"9", b"1e999"),
}


@pytest.mark.parametrize("body", BAD_LISTS.values(), ids=BAD_LISTS.keys())
async def test_http_store_malformed_list_is_unavailable(body):
    async with client_and_server(
        answers(200, body, headers="Content-Type: application/x-ndjson\r\n")
    ) as (store, _):
        with pytest.raises(StoreUnavailable):
            await listed(store, [])


async def test_http_store_list_that_stalls_is_unavailable():
    async def answer(asked):
        headers = "Content-Type: application/x-ndjson\r\n"
        asked.answer(200, LINE, length=2 * len(LINE), headers=headers)

    async with client_and_server(answer, first_s=1.0) as (store, _):
        got = []
        with pytest.raises(StoreUnavailable, match="broke off"):
            await listed(store, got)
        assert got == [A]


def ours(put):
    """A server that knows all but how to `put`."""

    async def answer(asked):
        if asked.method == "POST":
            asked.answer(200, b"\0" * (len(asked.body) // 32))
        elif asked.method == "GET":
            asked.answer(404)
        elif asked.path.endswith(".json"):
            asked.answer(204)
        else:
            await put(asked)

    return answer


def plain(put):
    """A plain server that answers a PUT of a block by `put`."""

    async def answer(asked):
        if asked.method == "PUT" and not asked.path.endswith(".json"):
            await put(asked)
        else:
            asked.answer(201 if asked.method == "PUT" else 404)

    return answer


async def test_http_store_put_to_a_full_server_sends_no_block():
    async with client_and_server(ours(answers(507, b"full"))) as (store, server):
        with pytest.raises(StoreFull):
            await store.put(A, block_of("a"))
        assert server.asked[-1].headers["expect"] == "100-continue"
        assert store.counters.failures == 0
        await store.close()
        await server.asked[-1].client_gone.wait()
        assert server.unasked == b""


async def test_http_store_put_whose_connection_breaks_is_repeated_with_its_body():
    async def breaks_once(asked):
        puts.append(asked.body)
        if len(puts) == 1:
            asked.reset()
        else:
            asked.answer(201)

    puts = []
    async with client_and_server(plain(breaks_once)) as (store, server):
        assert await store.put(A, block_of("a")) is True
        assert puts == [GOOD, GOOD]
        assert server.connections == 2  # a third one would have waited for a body


async def test_http_store_forgotten_namespace_is_described_once_more():
    async def forgets_once(asked):
        asked.answer(409 if len(puts) == 0 else 204)
        puts.append(asked.path)

    puts = []
    async with client_and_server(ours(forgets_once)) as (store, server):
        assert await store.put(A, block_of("a")) is False
        told = [asked.path for asked in server.asked if asked.path.endswith(".json")]
        assert len(told) == 4  # looked, told; looked, told
    async with client_and_server(ours(answers(409))) as (store, server):
        with pytest.raises(StoreUnavailable, match="forgets"):
            await store.put(A, block_of("a"))


async def test_http_store_slow_description_is_waited_for_longer_than_a_lookup(monkeypatch):
    """The server writes it to its disk; also where the last one was quick."""
    puts, claims, limits = [], [], []
    usual_limit = AdaptiveTimeout.timeout_s

    def timeout_s(limit, size_bytes):
        limits.append(usual_limit(limit, size_bytes))
        return limits[-1]

    monkeypatch.setattr(AdaptiveTimeout, "timeout_s", timeout_s)

    async def forgets_once(asked):
        puts.append(asked.path)
        asked.answer(409 if len(puts) == 1 else 204)

    usual = ours(forgets_once)

    async def answer(asked):
        if asked.method == "PUT" and asked.path.endswith(".json"):
            claims.append(limits[-1])  # how long this is waited for
        await usual(asked)

    async with client_and_server(answer, floor_s=LOOKUP_S) as (store, _):
        assert await store.put(A, block_of("a")) is False
        assert len(claims) == 2
        assert min(limits) == LOOKUP_S < min(claims)


@pytest.mark.parametrize(
    ("usual", "measured"), [(ours, False), (plain, True)], ids=["store serve", "a plain server"]
)
async def test_http_store_put_answered_without_its_body_leaves_the_time_limit(
    usual, measured, monkeypatch
):
    """`store serve` answers so that a block is there; a plain server has received it by then."""
    limits, of_puts = [], []
    usual_limit = AdaptiveTimeout.timeout_s

    def timeout_s(limit, size_bytes):
        limits.append(usual_limit(limit, size_bytes))
        return limits[-1]

    monkeypatch.setattr(AdaptiveTimeout, "timeout_s", timeout_s)

    async def there(asked):
        of_puts.append(limits[-1])
        asked.answer(204)

    bounds = {"floor_s": LOOKUP_S, "first_s": 4 * LOOKUP_S}
    async with client_and_server(usual(there), **bounds) as (store, _):
        for _ in range(3):
            assert await store.put(A, block_of("a")) is False
        later_s = LOOKUP_S if measured else 4 * LOOKUP_S
        assert of_puts == [4 * LOOKUP_S, later_s, later_s]


async def test_http_store_namespace_with_another_meaning_is_unavailable():
    async def answer(asked):
        asked.answer(200, b"" if asked.method == "POST" else b'{"model": "other"}')

    async with client_and_server(answer) as (store, server):
        with pytest.raises(StoreUnavailable, match="another namespace"):
            await store.put(A, block_of("a"))
        assert not [asked for asked in server.asked if asked.method == "PUT"]


@pytest.mark.parametrize("there", [0, 1, 16, 613, 999, 1000])
async def test_http_store_lookup_on_a_plain_server_sends_few_heads(there):
    keys = [key_of(number) for number in range(1000)]
    paths = {block_path(FRAME.digest, key) for key in keys[:there]}

    async def answer(asked):
        if asked.method == "POST":
            asked.answer(405)
        elif asked.path in paths:
            asked.answer(200, length=FRAMED_BYTES)
        else:
            asked.answer(404)

    async with client_and_server(answer) as (store, server):
        assert await store.contains(keys) == [True] * there + [False] * (1000 - there)
        heads = [asked for asked in server.asked if asked.method == "HEAD"]
        assert len(heads) <= HEADS_AT_ONCE * HEAD_ROUNDS


async def test_http_store_after_an_outage_detects_the_server_kind_again():
    async def answer(asked):
        if broken:
            asked.answer(500)
        elif asked.method == "HEAD":
            asked.answer(404)
        else:
            asked.answer(405)

    broken = []
    async with client_and_server(answer) as (store, server):
        assert await store.contains([A]) == [False]
        assert [asked.method for asked in server.asked] == ["POST", "HEAD"]
        assert await store.contains([A]) == [False]
        assert [asked.method for asked in server.asked[2:]] == ["HEAD"]
        broken.append(1)
        while not store.counters.breaker_openings:
            with pytest.raises(StoreUnavailable):
                await store.contains([A])
        broken.clear()
        server.asked.clear()
        clock.now_s += 60.0
        assert await store.contains([A]) == [False]
        assert [asked.method for asked in server.asked] == ["POST", "HEAD"]


def posts(server):
    return [asked.path for asked in server.asked if asked.method == "POST"]


async def test_http_store_passing_404_of_a_proxy_is_forgotten_after_a_pause(caplog):
    async def answer(asked):
        if away:
            asked.answer(404)
        elif "/contains" in asked.path:
            asked.answer(200, b"\1")
        else:
            asked.answer(204)

    away = [1]
    async with client_and_server(answer) as (store, server):
        assert await store.contains([A]) == [False]
        away.clear()
        await store.on_access([A], RequestFacts("r1", 10))
        assert len(posts(server)) == 1
        clock.now_s += ASK_AGAIN_FIRST_S
        server.asked.clear()
        for _ in range(2):
            assert await store.contains([A]) == [True]
        await store.on_access([A], RequestFacts("r1", 10))
        assert [asked.method for asked in server.asked] == ["POST"] * 3
        assert server.asked[-1].path == touched_path(FRAME.digest)
    assert [record.args for record in caplog.records] == [(server.base,)] * 2
    assert ["taken for" in record.message for record in caplog.records] == [True, False]


async def test_http_store_plain_server_is_asked_seldom_and_logged_once(caplog):
    async def answer(asked):
        asked.answer(405 if asked.method == "POST" else 404)

    async with client_and_server(answer) as (store, server):
        for asked in range(1, 10):
            await asyncio.gather(*(store.contains([A]) for _ in range(1 if asked == 1 else 4)))
            assert len(posts(server)) == asked
            await store.contains([A])
            clock.now_s += ASK_AGAIN_LAST_S
        clock.now_s -= 1.0
        await store.contains([A])
        assert len(posts(server)) == asked
    assert len(caplog.records) == 1


async def test_http_store_plain_server_is_asked_again_after_an_outage_with_lookups():
    state = "plain"

    async def answer(asked):
        if state == "down":
            asked.answer(500)
        elif asked.method == "POST" and state == "ours":
            asked.answer(200, b"\1")
        else:
            asked.answer(405 if asked.method == "POST" else 404)

    async with client_and_server(answer) as (store, server):
        await store.contains([A])
        state = "down"
        for _ in range(120):
            with pytest.raises(StoreUnavailable):
                await store.contains([A])
            clock.now_s += 1.0
        state = "ours"
        server.asked.clear()
        clock.now_s += LAST_S
        assert await store.contains([A]) == [True]
        assert [asked.method for asked in server.asked] == ["POST"]


async def test_http_store_head_lookups_are_bounded_and_one_error_fails_them():
    async def answer(asked):
        if asked.method == "POST":
            asked.answer(501)
            return
        if asked.path.endswith(key_of(40).hex()):
            asked.answer(403)
            return
        there = any(asked.path.endswith(key_of(n).hex()) for n in range(2))
        asked.answer(200 if there else 404, length=FRAMED_BYTES)

    async with client_and_server(answer) as (store, server):
        keys = [key_of(n) for n in range(40)]
        assert await store.contains(keys) == [n < 2 for n in range(40)]
        assert server.connections <= 17
        with pytest.raises(StoreUnavailable, match="403"):
            await store.contains([key_of(n) for n in range(40, 100)])
