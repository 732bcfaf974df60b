"""What the server answers, request by request."""

import asyncio
import contextlib
import errno
import json
import os
import re
from pathlib import Path

import pytest
from filestore import waiting_for_the_index
from http_servers import (
    BIG_FRAME,
    BIG_LAYOUT,
    FRAMED_BYTES,
    TOKEN,
    A,
    B,
    OurServer,
    ServerInProcess,
    ask,
    framed,
    metrics,
    opened,
    opened_client,
    put_block,
    put_description,
    read_status,
    serve_options,
    start_put,
    start_request,
    write_token,
)
from namespace_folder import NamespaceFolder
from polling import until
from private_files import write_private
from system_calls import Held, failing

from sglang_cake.cli import main
from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame
from sglang_cake.core.errors import BlockMissing, StoreFull, StoreUnavailable
from sglang_cake.core.keys import MAX_DESCRIPTION_BYTES, Namespace
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import UNREADABLE_S, BlockFolder
from sglang_cake.stores.http.protocol import (
    MAX_CONTAINS_KEYS,
    block_path,
    contains_path,
    description_path,
    list_path,
)
from sglang_cake.stores.http.server_blocks import MAX_BLOCK_BYTES, MAX_PUTS
from sglang_cake.testing.store_contract import FRAME, LAYOUT, block_of, key_of, read

PATH = block_path(FRAME.digest, A)
REFUSED_PUTS = 'requests_total{method="PUT",status="503"}'
GOOD = framed("a")


def test_store_serve_get_and_head_give_the_block_and_its_length(server):
    put_block(server, "a")
    status, headers, body = ask(server, "GET", PATH)
    assert (status, body) == (200, GOOD)
    assert headers["accept-ranges"] == "bytes"
    assert headers["content-type"] == "application/octet-stream"
    status, headers, body = ask(server, "HEAD", PATH)
    assert (status, body, headers["content-length"]) == (200, b"", str(FRAMED_BYTES))


RANGES = {
    "bytes=0-0": (0, 1),
    "bytes=4096-": (HEADER_BYTES, FRAMED_BYTES),
    "bytes=10-99": (10, 100),
    "bytes=-16": (FRAMED_BYTES - 16, FRAMED_BYTES),
    "bytes=-999999": (0, FRAMED_BYTES),
    "bytes=5-999999": (5, FRAMED_BYTES),
    f"bytes={FRAMED_BYTES}-": None,
    "bytes=9-5": None,
    "bytes=-0": None,
    "bytes=-00": None,
    "bytes=-": None,
    "bytes=0-1,3-4": None,
    "blocks=0-1": None,
    "bytes=a-b": None,
}


@pytest.mark.parametrize(("asked", "expected"), RANGES.items())
def test_store_serve_range_header_gives_the_range_or_416(server, asked, expected):
    put_block(server, "a")
    for method in ("GET", "HEAD"):
        status, headers, body = ask(server, method, PATH, headers={"Range": asked})
        if expected is None:
            assert status == 416
            continue
        start, stop = expected
        assert status == 206
        assert headers["content-range"] == f"bytes {start}-{stop - 1}/{FRAMED_BYTES}"
        assert headers["content-length"] == str(stop - start)
        assert body == (GOOD[start:stop] if method == "GET" else b"")


WRONG = {
    "a bit of the header": (GOOD[:100] + bytes([GOOD[100] ^ 1]) + GOOD[101:], 400),
    "the last bit": (GOOD[:-1] + bytes([GOOD[-1] ^ 1]), 400),
    "another block": (framed("b"), 400),
    "another namespace": (framed("a", frame=BlockFrame(Namespace((("a", "b"),)), LAYOUT)), 400),
    "one byte less": (GOOD[:-1], 400),
    "one byte more": (GOOD + b"x", 400),
    "the header alone": (GOOD[:HEADER_BYTES], 413),
    "nothing": (b"", 413),
    "no block": (b"x" * 10_000, 400),
}


@pytest.mark.parametrize(("body", "expected"), WRONG.values(), ids=WRONG.keys())
def test_store_serve_put_of_a_wrong_body_stores_no_block(server, body, expected):
    ask(server, "DELETE", PATH)
    assert ask(server, "PUT", PATH, body)[0] == expected
    assert ask(server, "GET", PATH)[0] == 404
    assert ask(server, "POST", contains_path(FRAME.digest, FRAMED_BYTES), A)[2] == b"\0"
    assert put_block(server, "a") == 201
    assert put_block(server, "a") == 204


async def test_store_serve_half_written_block_is_not_stored_until_it_is_put_again(tmp_path):
    server = OurServer(tmp_path / "root")
    put_description(server, BIG_FRAME)
    half_bytes = BIG_FRAME.framed_bytes // 2
    writing, _ = start_put(server, "a", BIG_FRAME, half_bytes)

    def is_half_written():
        return any(path.stat().st_size > half_bytes // 2 for path in tmp_path.rglob(".tmp-*"))

    async def has_no_block():
        async with opened_client(server.base, frame=BIG_FRAME) as store:
            assert await store.contains([A]) == [False]
            with pytest.raises(BlockMissing):
                await read(store, A, BIG_LAYOUT)
            return not [block async for block in store.list_blocks()]

    until(is_half_written, "half of the body is written")
    assert await has_no_block()
    assert not list(tmp_path.rglob(A.hex()))
    second, _ = start_put(server, "a", BIG_FRAME, 0)
    assert read_status(second) == 204  # it is being written
    writing.close()
    until(lambda: metrics(server)["puts_in_progress"] == 0, "the put is given up")
    assert not list(tmp_path.rglob(".tmp-*"))
    assert await has_no_block()
    assert put_block(server, "a", BIG_FRAME) == 201
    path = block_path(BIG_FRAME.digest, A)
    assert ask(server, "GET", path)[2] == framed("a", frame=BIG_FRAME)
    assert server.stop() == 0


def head(method, path, *fields):
    return "\n".join([f"{method} {path} HTTP/1.1", "Host: x", *fields, ""])


def test_store_serve_requests_beyond_the_limits_get_4xx_statuses(server):
    no_length = head("PUT", PATH, "Transfer-Encoding: chunked")
    assert read_status(start_request(server, no_length)) == 411
    too_long = head("PUT", PATH, f"Content-Length: {MAX_BLOCK_BYTES + 1}")
    assert read_status(start_request(server, too_long)) == 413
    expecting = head("PUT", PATH, "Content-Length: 9999", "Expect: a-miracle")
    ask(server, "DELETE", PATH)
    assert read_status(start_request(server, expecting)) == 417
    assert read_status(start_request(server, head("GET", "/" + "x" * 10_000))) == 400
    assert read_status(start_request(server, head("GET", PATH, "X-Long: " + "x" * 10_000))) == 400
    many = (f"X-{n}: y" for n in range(1000))
    assert read_status(start_request(server, head("GET", PATH, *many))) == 400


def test_store_serve_lookup_of_wrong_form_or_size_is_refused(server):
    put_block(server, "a")
    path = contains_path(FRAME.digest, FRAMED_BYTES)
    assert ask(server, "POST", path, A + B + A)[2] in (b"\1\0\1", b"\1\1\1")
    assert ask(server, "POST", path, b"")[2] == b""
    keys = b"".join(key_of(n) for n in range(MAX_CONTAINS_KEYS))
    assert ask(server, "POST", path, keys)[2].count(b"\0") > MAX_CONTAINS_KEYS - 10
    assert ask(server, "POST", path, keys + A)[0] == 413
    assert ask(server, "POST", path, A[:-1])[0] == 400
    for query in ("", "?bytes=", "?bytes=x", "?bytes=-1", "?bytes=1&bytes=2", "?size=1"):
        assert ask(server, "POST", path.partition("?")[0] + query, A)[0] == 400
    unknown = path.replace(FRAME.digest.hex(), "0" * 64)
    assert ask(server, "POST", unknown, A)[2] == b"\0"


def test_store_serve_namespace_needs_its_true_description_first(server):
    frame = BlockFrame(Namespace((("dtype", "told"), ("x", "y"))), LAYOUT)
    path, block = description_path(frame.digest), block_path(frame.digest, A)
    body = framed("a", frame=frame)
    assert ask(server, "PUT", block, body)[0] == 409
    assert ask(server, "GET", path)[0] == 404
    lies = [
        b"",
        b"[]",
        b'{"dtype": 1}',
        b'{"dtype": "lie"}',
        b'{"x": "y", "dtype": "told"}',
        b"[" * 10_000,
        b'{"dtype": "\\ud800"}',
    ]
    for lie in lies:
        assert ask(server, "PUT", path, lie)[0] == 400
    assert ask(server, "PUT", path, b" " * (MAX_DESCRIPTION_BYTES + 1))[0] == 413
    assert ask(server, "GET", path)[0] == 404
    put_description(server, frame)
    put_description(server, frame)
    assert json.loads(ask(server, "GET", path)[2]) == frame.namespace.describe()
    assert ask(server, "PUT", block, body)[0] == 201


def test_store_serve_description_that_another_process_removed_is_not_found(tmp_path):
    server = OurServer(tmp_path / "kv", "--workers", 1)
    path = description_path(FRAME.digest)
    put_description(server)
    assert ask(server, "GET", path)[0] == 200
    with contextlib.closing(BlockFolder(FolderSettings(tmp_path / "kv"))) as folder:
        folder.remove_namespace(FRAME.digest)
    assert ask(server, "GET", path)[0] == 404
    assert put_block(server, "a") == 201, "the block brings its namespace back"
    assert ask(server, "GET", path)[0] == 200
    assert server.stop() == 0


async def test_store_serve_equal_namespaces_with_two_names_share_blocks(server):
    names = (Namespace((("name", name), ("dtype", "shared"))) for name in ("M", "org/M"))
    one, two = (BlockFrame(namespace, LAYOUT) for namespace in names)

    async with opened_client(server.base, frame=one) as store:
        assert await store.put(A, block_of("a"))
    async with opened_client(server.base, frame=two) as store:
        assert await store.put(A, block_of("a")) is False  # it is there
    assert ask(server, "GET", block_path(two.digest, A))[0] == 200


def test_store_serve_unknown_methods_and_paths_get_405_or_404(server):
    for method in ("PATCH", "OPTIONS", "PROPFIND"):
        status, headers, _ = ask(server, method, PATH)
        assert (status, headers["allow"]) == (405, "GET, HEAD, PUT, POST, DELETE")
    assert ask(server, "DELETE", list_path(FRAME.digest))[0] == 405
    for path in ("/", "/stats/", "/index.db", PATH + "/", PATH.upper(), PATH[:-1], "/" + PATH):
        assert ask(server, "GET", path)[0] == 404


def test_store_serve_list_of_an_unknown_namespace_is_empty(server):
    assert ask(server, "GET", "/" + "0" * 64 + "/")[::2] == (200, b"")


def test_store_serve_health_stats_and_metrics_report_the_usage(server):
    put_block(server, "a")
    ask(server, "GET", PATH)
    assert ask(server, "GET", "/health")[::2] == (200, b"ok\n")
    stats = json.loads(ask(server, "GET", "/stats")[2])
    assert stats["blocks"] >= 1
    assert stats["used_bytes"] >= FRAMED_BYTES
    assert stats["capacity_bytes"] is None

    until(lambda: metrics(server)["sent_bytes_total"] >= FRAMED_BYTES, "what was sent is counted")
    numbers = metrics(server)
    assert numbers["connections"] >= 1
    assert numbers["received_bytes_total"] >= FRAMED_BYTES
    assert numbers['requests_total{method="GET",status="200"}'] >= 2
    assert numbers["blocks"] == stats["blocks"]
    assert "capacity_bytes" not in numbers
    kinds = ask(server, "GET", "/metrics")[2].decode()
    assert "# TYPE sglang_cake_store_sent_bytes_total counter\n" in kinds
    assert "# TYPE sglang_cake_store_blocks gauge\n" in kinds


def test_http_server_unknown_method_is_counted_as_other(server):
    ask(server, "PROPFIND", PATH)
    name = 'requests_total{method="other",status="405"}'
    until(lambda: metrics(server).get(name), "it is counted")


def test_store_serve_parallel_puts_are_bounded_in_number_and_memory(tmp_path):
    server = OurServer(tmp_path / "root", "--workers", 1)

    def peak_bytes():
        states = [Path(f"/proc/{pid}/status").read_text() for pid in server.workers()]
        return sum(int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024 for text in states)

    put_description(server, BIG_FRAME)
    before, almost = peak_bytes(), BIG_FRAME.framed_bytes - 1
    puts = [start_put(server, f"big{n}", BIG_FRAME, almost) for n in range(MAX_PUTS)]
    until(lambda: metrics(server)["puts_in_progress"] == MAX_PUTS, "all have begun")
    body = framed("next", frame=BIG_FRAME)
    path = block_path(BIG_FRAME.digest, key_of("next"))
    head = f"PUT {path} HTTP/1.1\nHost: x\nContent-Length: {len(body)}\nExpect: 100-continue\n"
    waiting = start_request(server, head)
    for connection, rest in puts:
        connection.sendall(rest)
        assert read_status(connection) == 201
        connection.close()
    assert waiting.recv(100).startswith(b"HTTP/1.1 100 ")
    waiting.sendall(body)
    assert read_status(waiting) == 201
    waiting.close()
    assert peak_bytes() - before < 50e6 < MAX_PUTS * BIG_FRAME.framed_bytes
    assert server.stop() == 0


async def test_http_store_more_puts_than_the_server_has_places_need_no_second_try(tmp_path):
    count = 3 * MAX_PUTS
    with OurServer(tmp_path / "root", "--workers", 1) as server:
        async with opened_client(server.base, frame=BIG_FRAME, depth=count) as store:
            names = [f"big{n}" for n in range(count)]
            puts = (store.put(key_of(name), block_of(name, BIG_LAYOUT)) for name in names)
            assert await asyncio.gather(*puts) == [True] * count
            assert store.counters.retries == 0


def test_http_server_put_that_waits_too_long_for_other_puts_gets_503(tmp_path, monkeypatch):
    held = Held(os.writev)
    with ServerInProcess(tmp_path / "root", stuck_s=2.0) as server:
        put_description(server)
        monkeypatch.setattr(os, "writev", held)  # a disk that hangs
        puts = [start_put(server, n, FRAME, FRAMED_BYTES)[0] for n in range(MAX_PUTS)]
        until(lambda: server.metrics()["puts_in_progress"] == MAX_PUTS, "all have begun")
        status, headers, _ = ask(server, "PUT", PATH, GOOD)
        assert (status, headers["retry-after"]) == (503, "1")
        held.go.set()
        for connection in puts:
            assert read_status(connection) == 201
            connection.close()


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EIO, 503)])
@pytest.mark.parametrize("call", ["writev", "replace"])
def test_http_server_put_to_a_disk_in_trouble_tells_the_client_and_writing_pauses(
    tmp_path, monkeypatch, caplog, call, number, status
):
    with ServerInProcess(tmp_path / "root") as server:
        put_description(server)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(number))
            found = ask(server, "PUT", PATH, GOOD)
            assert (found[0], os.strerror(number).encode() in found[2]) == (status, True)
            resting = b"writing rests"
            until(lambda: resting in ask(server, "PUT", PATH, GOOD)[2], "there is a pause")
        assert ask(server, "GET", PATH)[0] == 404
        assert "Traceback" not in caplog.text


def test_http_server_without_an_index_lacks_its_totals_only(tmp_path):
    (tmp_path / "index.db").mkdir()
    with waiting_for_the_index(0.0), ServerInProcess(tmp_path) as server:
        status, _, body = ask(server, "GET", "/stats")
        found = metrics(server)
    assert status == 200
    stats = json.loads(body)
    assert {name for name, value in stats.items() if value is None} == {
        *("blocks", "block_bytes", "used_bytes", "capacity_bytes")
    }
    assert "workers" in found
    assert "blocks" not in found


def test_http_server_get_from_a_disk_in_trouble_gets_503(tmp_path, monkeypatch, caplog):
    with ServerInProcess(tmp_path / "root") as server:
        put_description(server)
        put_block(server, "a")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", failing(errno.EIO))
            assert ask(server, "GET", PATH)[0] == 503
        assert ask(server, "GET", PATH)[::2] == (200, GOOD)
        assert "Traceback" not in caplog.text


def test_http_server_block_with_read_errors_is_set_aside_if_others_are_read(tmp_path, monkeypatch):
    now_s = 0.0
    with ServerInProcess(tmp_path / "root", clock=lambda: now_s) as server:
        put_description(server)
        put_block(server, "a")
        put_block(server, "b")
        found = []
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(os, "pread", failing(errno.EIO))
                found.append(ask(server, "GET", PATH)[0])
            now_s += UNREADABLE_S
            if len(found) == 2:  # until then the disk may be at fault
                assert ask(server, "GET", block_path(FRAME.digest, key_of("b")))[0] == 200
        assert found == [503, 503, 404]


def test_store_serve_index_rebuilt_beside_an_unreadable_folder_counts_it(tmp_path, monkeypatch):
    with ServerInProcess(tmp_path) as server:
        put_description(server)
        put_block(server, "a")
        assert metrics(server)["unreadable_files_total"] == 0
    (tmp_path / "index.db").unlink()
    damaged = NamespaceFolder(tmp_path, FRAME.digest).block(A).parent.stat()
    listdir = os.listdir

    def fail_for_one(folder):
        if os.path.samestat(os.stat(folder), damaged):
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN))
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", fail_for_one)
    with ServerInProcess(tmp_path) as server:
        until(lambda: metrics(server)["unreadable_files_total"] == 1, "it is counted")


def test_http_server_puts_beyond_half_of_the_connections_get_503_and_lookups_answers(
    tmp_path, monkeypatch
):
    most = 4 * MAX_PUTS
    held = Held(os.writev)
    with ServerInProcess(tmp_path / "root", most_connections=most) as server:
        put_description(server)
        monkeypatch.setattr(os, "writev", held)  # a disk that hangs
        puts = [start_put(server, n, FRAME, FRAMED_BYTES)[0] for n in range(most)]
        until(lambda: server.metrics().get(REFUSED_PUTS) == most // 2, "as many are refused")
        assert ask(server, "POST", contains_path(FRAME.digest, FRAMED_BYTES), A)[2] == b"\0"
        held.go.set()
        found = [read_status(connection) for connection in puts]
        assert sorted(found) == [201] * (most // 2) + [503] * (most // 2)
        for connection in puts:
            connection.close()


async def test_store_serve_valid_token_is_required_except_for_health(tmp_path):
    tokens = write_private(tmp_path / "tokens", f"{TOKEN}\n\nan-older-token-still-good\n")
    with OurServer(tmp_path / "root", "--token-file", tokens, "--host", "127.0.0.1") as server:
        assert ask(server, "GET", "/health", token=None)[0] == 200
        wrong = [
            None,
            {"Authorization": TOKEN},
            {"Authorization": "Bearer "},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": "Bearer \xff\xfe"},
        ]
        paths = ["/stats", "/metrics", "/namespaces", PATH, "/nothing", list_path(FRAME.digest)]
        for headers in wrong:
            for path in paths:
                status, said, _ = ask(server, "GET", path, headers=headers, token=None)
                assert (status, said["www-authenticate"]) == (401, "Bearer")
            assert ask(server, "PUT", PATH, GOOD, headers, None)[0] == 401
            assert ask(server, "DELETE", PATH, headers=headers, token=None)[0] == 401
        for token in (TOKEN, "an-older-token-still-good"):
            assert ask(server, "GET", "/stats", token=token)[0] == 200
        for token in (None, "not-the-right-token"):
            async with opened_client(server.base, token=token) as store:
                for call in (store.contains([A]), read(store, A), store.put(A, block_of("a"))):
                    with pytest.raises(StoreUnavailable, match=r"401: no token.*\?token_file="):
                        await call
        async with opened_client(server.base, token=TOKEN) as store:
            assert await store.put(A, block_of("a"))
            assert await read(store, A) == block_of("a")


async def put_many(store, stored):
    for n in range(100):
        await store.put(key_of(n), block_of(n))
        stored.append(n)


async def test_store_serve_namespace_quota_applies_to_each_namespace(tmp_path):
    with OurServer(tmp_path / "root", "--namespace-quota", "60kB") as server:
        for frame in (FRAME, BlockFrame(Namespace((("model", "other"),)), LAYOUT)):
            async with opened_client(server.base, frame=frame) as store:
                stored = []
                with pytest.raises(StoreFull, match="quota of 60000 bytes"):
                    await put_many(store, stored)
                assert stored
                with pytest.raises(StoreFull):
                    await store.put(key_of("more"), block_of("more"))
                assert store.counters.failures == 0
                for n in stored:
                    assert await read(store, key_of(n)) == block_of(n)
                    await store.delete(key_of(n))
                assert await store.put(key_of(stored[0]), block_of(stored[0]))


async def test_store_serve_without_free_space_refuses_puts_as_full(tmp_path):
    with OurServer(tmp_path / "root", "--min-free", "900PB") as server:
        async with opened_client(server.base) as store:
            with pytest.raises(StoreFull):
                await store.put(B, block_of("b"))
            assert metrics(server)["received_bytes_total"] == 0
            assert await store.contains([B]) == [False]


def test_store_serve_low_free_space_evicts_blocks_without_puts(tmp_path):
    first = OurServer(tmp_path / "root")
    put_description(first)
    put_block(first, "a")
    assert first.stop() == 0
    with OurServer(tmp_path / "root", "--min-free", "900PB") as server:
        until(lambda: ask(server, "GET", PATH)[0] == 404, "it has made way")


async def test_store_serve_many_parallel_clients_read_the_right_blocks(server):
    stores = [opened(server.base, depth=4) for _ in range(6)]
    written = asyncio.Barrier(len(stores))

    async def work(store):
        for n in range(10):
            await store.put(key_of(("many", n)), block_of(("many", n)))
        await written.wait()  # a put also returns while another client's put of the block goes on
        return [await read(store, key_of(("many", n))) for n in range(10)]

    got = await asyncio.gather(*(work(store) for store in stores))
    assert got == [[block_of(("many", n)) for n in range(10)]] * 6
    for store in stores:
        assert store.counters.failures == 0
        await store.close()


def test_store_serve_invalid_options_are_one_line_and_exit_status_2(tmp_path, server, capsys):
    def refusal(root, *options):
        assert main(["store", "serve", *serve_options(root, *options)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    root, token = tmp_path / "root", write_token(tmp_path)
    (tmp_path / "file").write_text("")
    short = write_private(tmp_path / "short", "secret\n")
    open_to_all = tmp_path / "open"
    open_to_all.write_text(TOKEN)
    open_to_all.chmod(0o640)
    mistakes = {
        ("--port", server.port): "cannot listen",
        ("--port", 99999): "65535",
        ("--host", "192.0.2.1", "--token-file", token): "cannot listen",
        ("--token-file", open_to_all): "chmod 600",
        ("--token-file", short): "at least 16",
        ("--token-file", tmp_path / "none"): "cannot be read",
        ("--tls-cert", token): "go together",
        ("--tls-cert", token, "--tls-key", token): "cannot be used",
        ("--capacity", "1kB"): "capacity",
        ("--policy", "random"): "lfu",
        ("--namespace-quota", "0GB"): "--namespace-quota: '0GB' would keep nothing",
    }
    for options, word in mistakes.items():
        said = refusal(root, *options)
        assert said.startswith("sglang-cake: "), said
        assert said.count("\n") == 1
        assert word in said
    assert "cannot be made" in refusal(tmp_path / "file")
