"""Whatever comes over the wire: the server goes on, and nothing wrong becomes visible."""

import asyncio
import json
import os
import socket

import pytest
from bad_server import bad_server
from http_servers import (
    WAIT_S,
    A,
    B,
    OurServer,
    ask,
    framed,
    put_block,
    put_description,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_cake.cli import main
from sglang_cake.codecs.frame import HEADER_BYTES
from sglang_cake.core.errors import BlockCorrupt, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest, read_fields
from sglang_cake.stores.base import EVICTION_COUNTS, EvictionCounts, StoredNamespace, StoreStats
from sglang_cake.stores.http import protocol
from sglang_cake.stores.http.protocol import Kind, block_path, parse_path
from sglang_cake.stores.http.server_blocks import BlockCheck
from sglang_cake.testing.store_contract import FRAME

GOOD = framed("a")
PATH = block_path(FRAME.digest, A)
SECRET = b"not below the root"
FUZZ = settings(
    max_examples=settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server whose root has something beside it that nobody may see."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "secret").write_bytes(SECRET)
    server = OurServer(folder / "root")
    put_description(server)
    put_block(server, "a")
    server.folder = folder
    yield server
    assert server.stop() == 0


def visible(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


SEGMENTS = st.one_of(
    st.sampled_from(
        [
            *("..", ".", "", "%2e%2e", "%2e", "..%2f..", "%00", "\\..", "~", "secret", "root"),
            *("index.db", "namespace.json", "contains", "corrupt", "ab", "AB", "..;"),
            *(FRAME.digest.hex(), A.hex(), A.hex()[:2], A.hex()[2:4], B.hex(), "0" * 64),
        ]
    ),
    st.text("".join(map(chr, range(33, 127))).replace("#", "").replace("?", ""), max_size=8),
)


@FUZZ
@given(st.sampled_from(["GET", "HEAD", "PUT", "DELETE", "POST"]), st.lists(SEGMENTS, max_size=6))
@example("GET", ["..", "secret"])
@example("GET", ["%2e%2e", "secret"])
@example("PUT", ["..", "secret"])
@example("DELETE", [FRAME.digest.hex(), "..", "..", "secret"])
@example("GET", [FRAME.digest.hex(), A.hex()[:2], A.hex()[2:4], "..", "..", "..", "..", "secret"])
def test_store_serve_no_request_path_leads_out_of_the_root(guarded, method, segments):
    before = visible(guarded.folder)
    path = "/" + "/".join(segments)
    status, _, body = ask(guarded, method, path, b"x" if method in ("PUT", "POST") else None)
    assert status < 500
    assert SECRET not in body
    assert (guarded.folder / "secret").read_bytes() == SECRET
    if method == "DELETE" and path == PATH:
        put_block(guarded, "a")
    assert visible(guarded.folder) == before


@given(st.one_of(st.text(), st.lists(SEGMENTS).map(lambda parts: "/" + "/".join(parts))))
def test_parse_path_of_random_text_accepts_only_canonical_block_paths(path):
    resource = parse_path(path)
    if resource is not None and resource.kind is Kind.BLOCK:
        assert block_path(resource.digest, resource.key) == path
        assert (len(resource.digest), len(resource.key)) == (32, 32)
    elif resource is not None and resource.digest:
        assert path.startswith(f"/{resource.digest.hex()}/")


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_parse_path_inverts_block_path_for_every_block(digest, key):
    resource = parse_path(block_path(Digest(digest), BlockKey(key)))
    assert (resource.kind, resource.digest, resource.key) == (Kind.BLOCK, digest, key)


def broken(draw):
    """A good block with something done to it; sometimes nothing."""
    body = bytearray(GOOD)
    for _ in range(draw(st.integers(0, 3))):
        what = draw(st.sampled_from(["flip", "cut", "add", "swap", "overwrite"]))
        at = draw(st.integers(0, max(0, len(body) - 1)))
        if what == "flip" and body:
            body[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del body[at:]
        elif what == "add":
            body += draw(st.binary(max_size=100))
        elif what == "swap":
            body = body[at:] + body[:at]
        else:
            piece = draw(st.binary(max_size=64))
            body[at : at + len(piece)] = piece
    return bytes(body)


BODIES = st.one_of(st.composite(broken)(), st.binary(max_size=200))


@FUZZ
@given(BODIES)
@example(GOOD)
@example(framed("b"))
def test_store_serve_put_of_random_bytes_stores_only_the_whole_block(server, body):
    assert ask(server, "DELETE", PATH)[0] == 204
    status, _, _ = ask(server, "PUT", PATH, body)
    assert (status == 201) == (body == GOOD)
    assert status in (201, 400, 413)
    assert ask(server, "GET", PATH)[::2] == (
        (200, GOOD) if body == GOOD else (404, b"no such block\n")
    )


@given(BODIES, st.lists(st.integers(1, 2000), max_size=8))
def test_passing_block_verdict_does_not_depend_on_the_piece_sizes(body, cuts):
    def verdict(pieces):
        block = BlockCheck(FRAME.digest, A, len(body))
        try:
            for piece in pieces:
                block.feed(memoryview(piece))
            block.finish()
        except BlockCorrupt:
            return False
        return True

    pieces, start = [body[:HEADER_BYTES]], HEADER_BYTES
    for cut in cuts:
        pieces.append(body[start : start + cut])
        start += cut
    pieces.append(body[start:])
    assert verdict([body]) == verdict(pieces) == (body == GOOD)


@FUZZ
@given(
    st.one_of(
        st.binary(min_size=1, max_size=300),
        st.lists(
            st.sampled_from(
                [
                    *(b"GET ", b"PUT ", b"POST ", PATH.encode(), b" HTTP/1.1\r\n", b"\r\n"),
                    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Host: x\r\n"),
                    *(b"Transfer-Encoding: chunked\r\n", b"ffffffffffffffff\r\n", b"0\r\n\r\n"),
                    *(b"Range: bytes=0-\r\n", b"Expect: 100-continue\r\n", b"hello", b"\0"),
                    *(b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Authorization: \xff\r\n"),
                ]
            ),
            min_size=1,
            max_size=12,
        ).map(b"".join),
    )
)
def test_store_serve_random_bytes_end_only_their_connection(server, data):
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        said = b""
        try:
            while piece := connection.recv(65536):
                said += piece
        except ConnectionResetError:
            pass
    assert not said or said.startswith(b"HTTP/1.")
    assert b" 500 " not in said
    assert ask(server, "GET", "/health")[0] == 200


@given(st.binary(max_size=200), st.integers(0, 40))
def test_read_answers_of_a_random_body_are_bits_or_unavailable(body, count):
    try:
        answers = protocol.read_answers(body, count)
    except protocol.StoreUnavailable:
        return
    assert bytes(answers) == body
    assert len(body) == count


HOSTILE_LINES = {
    "no number": (FRAME.framed_bytes, "NaN"),
    "an infinite time": (FRAME.framed_bytes, "1e999"),
    "a time that no calendar has": (FRAME.framed_bytes, "1e300"),
    "a time before 1970": (FRAME.framed_bytes, "-1e9"),
    "a text": (FRAME.framed_bytes, '"2026"'),
    "a negative size": (-1, "0.0"),
    "a size of 400 digits": (10**400, "0.0"),
}


@pytest.mark.parametrize(("size", "used_s"), HOSTILE_LINES.values(), ids=HOSTILE_LINES.keys())
async def test_store_ls_of_a_lying_server_is_one_line_and_exit_status_2(capsys, size, used_s):
    line = f'{{"key": "{A.hex()}", "bytes": {size}, "used_s": {used_s}}}\n'
    space = StoredNamespace(FRAME.digest, FRAME.namespace.describe())

    async def answer(asked):
        if asked.path.startswith(protocol.NAMESPACES):
            asked.answer(200, json.dumps(protocol.write_namespaces([space])).encode())
        else:
            kind = f"Content-Type: {protocol.LIST_TYPE}\r\n"
            asked.answer(200, line.encode(), headers=kind)

    async with bad_server(answer) as server:
        for names in ([], [FRAME.digest.hex()]):
            assert await asyncio.to_thread(main, ["store", "ls", server.base, *names]) == 2
            said = capsys.readouterr().err
            assert said.startswith("sglang-cake: the list has a malformed line"), said
            assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, -1) for name in ("blocks", "used_bytes", "unused_bytes", "evicted_bytes")),
        ("used_bytes", 10**400),
        ("policy", "\x1b[2J"),
    ],
)
def test_read_stats_number_or_name_that_no_store_has_is_unavailable(name, value):
    with pytest.raises(StoreUnavailable, match=name):
        protocol.read_stats(json.dumps({name: value}).encode())


def test_read_stats_of_written_ones_are_the_same():
    numbers = iter(range(1, 10))
    evictions = EvictionCounts(*(next(numbers) for _ in EVICTION_COUNTS))
    stats = StoreStats(*(next(numbers) for _ in range(4)), evictions, "cake-prefix", next(numbers))
    assert protocol.read_stats(json.dumps(protocol.write_stats(stats)).encode()) == stats


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner),
        st.dictionaries(
            st.sampled_from(["key", "bytes", "used_s", "blocks", "policy", "digest", "fields"]),
            inner,
        ),
    ),
)


@given(st.one_of(st.binary(max_size=200), JSON.map(lambda value: json.dumps(value).encode())))
def test_http_protocol_random_server_text_raises_only_unavailable(body):
    for read in (protocol.read_stats, protocol.read_block_line, protocol.read_namespaces):
        try:
            read(body)
        except protocol.StoreUnavailable:
            continue
    read_fields(body)


LINKS = {
    "a link to a secret": lambda path, outside: path.symlink_to(outside),
    "a secret": lambda path, outside: os.link(outside, path),
    "a link to a block": lambda path, outside: path.symlink_to(path.with_name(B.hex())),
    "another block": lambda path, outside: path.write_bytes(framed("b")),
    "a block of another length": lambda path, outside: path.write_bytes(GOOD + b"x"),
    "a huge file": lambda path, outside: (path.write_bytes(GOOD), os.truncate(path, 1 << 42)),
    "the beginning of a header": lambda path, outside: path.write_bytes(GOOD[:100]),
}


@pytest.mark.parametrize("what", LINKS)
def test_store_serve_file_that_is_not_the_block_is_not_sent(tmp_path, what):
    outside = tmp_path / "secret"
    outside.write_bytes(SECRET * 1000)
    with OurServer(tmp_path / "root") as server:
        put_description(server)
        put_block(server, "a")
        name = A.hex()
        path = tmp_path / "root" / FRAME.digest.hex() / name[:2] / name[2:4] / name
        path.unlink()
        LINKS[what](path, outside)
        for _ in range(2):
            assert ask(server, "GET", PATH)[::2] == (404, b"no such block\n")
        assert outside.read_bytes() == SECRET * 1000
        assert put_block(server, "a") == 201  # it has made way
        assert ask(server, "GET", PATH)[2] == GOOD


@pytest.mark.parametrize("above", [1, 2, 3])
def test_store_serve_folder_that_is_a_symlink_is_not_entered(tmp_path, above):
    with OurServer(tmp_path / "root") as server:
        put_description(server)
        put_block(server, "a")
        name = A.hex()
        path = tmp_path / "root" / FRAME.digest.hex() / name[:2] / name[2:4] / name
        folder = path.parents[above - 1]
        folder.rename(tmp_path / "outside")
        folder.symlink_to(tmp_path / "outside")
        before = visible(tmp_path / "outside")
        assert ask(server, "GET", PATH)[0] in (404, 503)
        ask(server, "DELETE", PATH)
        ask(server, "PUT", PATH, GOOD)
        assert visible(tmp_path / "outside") == before
