"""Tokens and certificates: made by itself, asked for, and replaced while they are in use."""

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filestore import closing, folder_of
from http_servers import (
    TOKEN,
    WAIT_S,
    A,
    B,
    OurServer,
    ServerInProcess,
    ask,
    framed,
    make_certificate,
    own_token,
    parse_metrics,
    put_block,
    put_description,
    write_token,
)
from polling import until
from private_files import write_private
from system_calls import Held

from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.stores.base import RequestFacts
from sglang_cake.stores.eviction.policy import UNKNOWN_CONTEXT, AccessContext
from sglang_cake.stores.http.auth import ServerCredentials, own_token_path
from sglang_cake.stores.http.http_store import HttpSource
from sglang_cake.stores.http.protocol import (
    FACTS_HEADER,
    STATS,
    block_path,
    description_path,
    list_path,
    touched_path,
)
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.stores.reported_accesses import ReportedAccesses
from sglang_cake.testing.store_contract import FRAME, block_of, read

PATH = block_path(FRAME.digest, A)
OTHER = "another-token-of-enough-characters"
READING = "a-token-of-those-who-only-read"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Of a user who has never used the package."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def test_store_serve_without_options_requires_its_own_token(tmp_path, home):
    with OurServer(tmp_path / "root") as server:
        (path,) = home.rglob("store-token*")
        assert path == own_token_path()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert re.fullmatch(r"[0-9a-f]{64}\n", path.read_text())
        assert str(path) in server.prints.readline()
        put_description(server)
        put_block(server, "a")
        for host in ("127.0.0.1", "evil.example"):
            headers = {"Host": host}
            for where in ("/namespaces", "/stats", "/metrics", list_path(FRAME.digest), PATH):
                assert ask(server, "GET", where, headers=headers, token=None)[0] == 401
            assert ask(server, "PUT", PATH, framed("b"), headers, None)[0] == 401
            assert ask(server, "DELETE", PATH, headers=headers, token=None)[0] == 401
        assert ask(server, "GET", "/health", token=None)[0] == 200
        assert ask(server, "GET", PATH)[2] == framed("a")


def opened_url(url):
    return closing(parse_sources(url)[0].open(FRAME, depth=2))


def test_http_source_check_of_a_refused_token_says_what_to_set(tmp_path, home):
    (tmp_path / "wrong").mkdir()
    (tmp_path / "readers").mkdir()
    good, wrong = write_token(tmp_path), write_token(tmp_path / "wrong", OTHER)
    readers = write_token(tmp_path / "readers", READING)
    with OurServer(
        *(tmp_path / "root", "--token-file", good, "--read-token-file", readers)
    ) as server:
        for url in (server.base, f"{server.base}?token_file={wrong}"):
            with pytest.raises(ConfigError) as error:
                parse_sources(url)[0].check()
            said = str(error.value)
            assert said.startswith(f"{server.base}: GET was answered 401: no token, or not one of")
            assert said.endswith("; name a file with one by ?token_file=/path in the URL")
        for token_file in (good, readers):
            parse_sources(f"{server.base}?token_file={token_file}")[0].check()


async def test_http_source_check_within_a_running_loop_refuses_too(tmp_path, home):
    with (
        OurServer(tmp_path / "root", "--token-file", write_token(tmp_path)) as server,
        pytest.raises(ConfigError, match="401"),
    ):
        parse_sources(server.base)[0].check()


def test_http_source_check_of_a_silent_server_passes():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        HttpSource(f"http://127.0.0.1:{silent.getsockname()[1]}", check_s=0.05).check()


@pytest.mark.parametrize(
    ("host", "trusted", "expired", "why"),
    [
        ("127.0.0.1", False, False, "self-signed certificate"),
        ("localhost", True, False, "Hostname mismatch, certificate is not valid for 'localhost'."),
        ("127.0.0.1", True, True, "certificate has expired"),
    ],
    ids=["unknown CA", "another host", "expired"],
)
def test_http_source_check_of_a_refused_certificate_says_what_to_set(
    tmp_path, home, host, trusted, expired, why
):
    cert, key = make_certificate(tmp_path)
    if expired:
        command = ["openssl", "x509", "-in", cert, "-signkey", key, "-days", "-1", "-out", cert]
        subprocess.run(command, check=True, capture_output=True)
    with ServerInProcess(tmp_path / "root", tls=(cert, key)) as server:
        base = f"https://{host}:{server.port}"
        with pytest.raises(ConfigError) as error:
            parse_sources(f"{base}?ca={cert}" if trusted else base)[0].check()
    assert str(error.value) == (
        f"{base}: its certificate is refused: {why}; it needs one that is valid now, for this "
        "host, and from a CA of this machine or of the file of ?ca=/path in the URL"
    )


def test_s3_source_check_of_a_refused_certificate_says_what_to_set(tmp_path, home, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anything")
    cert, key = make_certificate(tmp_path)
    with ServerInProcess(tmp_path / "root", tls=(cert, key)) as server:
        url = f"s3://bucket?endpoint=https://127.0.0.1:{server.port}&region=us-east-1"
        with pytest.raises(ConfigError) as error:
            parse_sources(url)[0].check()
        assert "self-signed certificate" in str(error.value)
        assert "\n" not in str(error.value)
        assert "AWS_CA_BUNDLE" in str(error.value)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(cert))
        with pytest.raises(ConfigError) as error:
            parse_sources(url)[0].check()
        assert "ertificate" not in str(error.value)  # our server refuses the request itself
    for unusable in (tmp_path / "absent", tmp_path, key):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(unusable))
        with pytest.raises(ConfigError, match="AWS_CA_BUNDLE names"):
            parse_sources(url)[0].check()


def test_store_serve_prints_a_url_that_clients_can_use(tmp_path, home):
    with OurServer(tmp_path / "root", "--token-file", write_token(tmp_path)) as server:
        line = server.prints.readline()
        (url,) = re.findall('--cake-store "([^"]*)"', line)
        assert url.startswith(server.base)
        parse_sources(url)[0].check()


async def test_http_store_opened_before_the_server_finds_its_token(tmp_path, home):
    other = OurServer(tmp_path / "other", "--token-file", write_token(tmp_path))
    port = other.port
    assert other.stop() == 0
    assert not list(home.rglob("*"))
    async with opened_url(f"http://127.0.0.1:{port}") as store:
        server = await asyncio.to_thread(OurServer, tmp_path / "root", port=port)
        try:
            assert await store.put(A, block_of("a"))
            assert await read(store, A) == block_of("a")
            assert store.counters.failures == 0
        finally:
            assert await asyncio.to_thread(server.stop) == 0


@pytest.mark.parametrize(
    ("url", "is_sent"),
    [
        ("http://127.0.0.1:8700", True),
        ("https://127.9.9.9", True),
        ("http://[::1]:8700", True),
        ("http://localhost:8700/kv", True),
        ("http://kv-host:8700", False),
        ("http://10.0.0.1:8700", False),
        ("http://127.0.0.1.example", False),
    ],
)
def test_http_source_own_token_is_sent_to_this_machine_only(url, is_sent):
    token = own_token()
    (source,) = parse_sources(url)
    assert source.locate().token == (token if is_sent else None)
    assert token not in repr(source.locate())


def test_own_token_without_a_home_folder_is_neither_sent_nor_made(tmp_path, monkeypatch, capsys):
    from sglang_cake.cli import main

    def no_home():
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    (source,) = parse_sources("http://127.0.0.1:8700")
    assert source.locate().token is None
    assert main(["store", "serve", "--root", str(tmp_path)]) == 2
    assert "set --token-file FILE" in capsys.readouterr().err


async def test_store_serve_read_token_allows_reads_and_refuses_writes(tmp_path):
    """A client that has no other goes on reading, however many writes are refused."""
    (tmp_path / "readers").mkdir()
    readers, writers = write_token(tmp_path / "readers", OTHER), write_token(tmp_path)
    with OurServer(
        *(tmp_path / "root", "--token-file", writers, "--read-token-file", readers)
    ) as server:

        def received():
            return parse_metrics(ask(server, "GET", "/metrics", token=OTHER)[2].decode())[
                "received_bytes_total"
            ]

        async with opened_url(f"{server.base}?token_file={writers}") as store:
            assert await store.put(A, block_of("a"))
        before = received()
        async with opened_url(f"{server.base}?token_file={readers}") as store:
            assert await store.contains([A, B]) == [True, False]
            for _ in range(10):
                with pytest.raises(StoreUnavailable, match="only read"):
                    await store.put(B, block_of("b"))
                with pytest.raises(StoreUnavailable, match="only read"):
                    await store.delete(A)
            await store.on_access([A], RequestFacts("id", 1))
            assert [block.key async for block in store.list_blocks()] == [A]
            assert await read(store, A) == block_of("a")
            assert store.counters.failures == 0
        assert received() == before
        path = description_path(FRAME.digest)
        assert ask(server, "PUT", path, b"{}", token=OTHER)[0] == 403


def test_store_serve_report_with_a_read_token_counts_as_use_alone(tmp_path):
    """Its tenant and purpose could evict blocks: those of a tenant above its quota go at once."""
    (tmp_path / "readers").mkdir()
    readers, root = write_token(tmp_path / "readers", OTHER), tmp_path / "root"

    def report(keys, facts, token):
        headers = {FACTS_HEADER: facts.to_json()}
        path = touched_path(FRAME.digest)
        assert ask(server, "POST", path, b"".join(keys), headers, token)[0] == 204

    with OurServer(root, "--workers", 1, "--read-token-file", readers) as server:
        put_description(server)
        report([A], RequestFacts("theirs", 1, "chat", 7), own_token())
        assert put_block(server, "a") == 201
        report([A, B], RequestFacts("mine", 1, "batch", 9), OTHER)
        assert put_block(server, "b") == 201
    with contextlib.closing(folder_of(root)) as folder, folder.supervisor.open() as index:
        usages = {block.key: block.usage for block in index.stored(0, 10)}
    assert usages[A].context == AccessContext("chat", 1, 0, 1, 7)
    assert usages[A].uses == 1
    assert usages[B].context == UNKNOWN_CONTEXT


def replace_token(path, text):
    """As an operator should: whole, or not at all."""
    write_private(path.with_name("new"), text).rename(path)


def test_store_serve_replaced_token_file_takes_effect_unless_invalid(tmp_path):
    path = write_token(tmp_path)
    with OurServer(tmp_path / "root", "--token-file", path, "--workers", 2) as server:

        def are_let_in(*tokens):
            """Several connections: both workers."""
            return all(ask(server, "GET", "/stats", token=t)[0] == 200 for t in tokens * 4)

        def are_kept_out(*tokens):
            return all(ask(server, "GET", "/stats", token=t)[0] == 401 for t in tokens * 4)

        assert are_let_in(TOKEN)
        assert are_kept_out(OTHER)
        replace_token(path, f"{OTHER}\n{TOKEN}\n")
        until(lambda: are_let_in(TOKEN, OTHER), "both are valid")
        replace_token(path, f"{OTHER}\n")
        until(lambda: are_kept_out(TOKEN), "the old one is not valid any more")
        assert are_let_in(OTHER)
        path.chmod(0o644)
        until(lambda: server.stderr().count("stays in force") >= 2, "both workers have seen it")
        assert f"token file {path} is open to others" in server.stderr()
        assert OTHER not in server.stderr()
        assert are_let_in(OTHER)


def test_server_credentials_removed_token_is_refused_while_another_file_is_invalid(tmp_path):
    for name in ("reading", "tls"):
        (tmp_path / name).mkdir()
    path, read_path = write_token(tmp_path), write_token(tmp_path / "reading", READING)
    cert, key = make_certificate(tmp_path / "tls")
    credentials = ServerCredentials(path, read_path, tls_files=(cert, key))
    for invalid in (read_path, cert):
        replace_token(path, f"{TOKEN}\n")
        credentials.refresh()
        before = invalid.read_text()
        write_private(invalid, "no token")
        replace_token(path, f"{OTHER}\n")
        with pytest.raises(ConfigError):
            credentials.refresh()
        assert not credentials.tokens.may_write(f"Bearer {TOKEN}")
        assert credentials.tokens.may_write(f"Bearer {OTHER}")
        assert credentials.tokens.may_read(f"Bearer {READING}"), "what was valid stays in force"
        write_private(invalid, before)


def test_server_credentials_file_that_grows_too_long_changes_no_token(tmp_path):
    path = write_token(tmp_path)
    credentials = ServerCredentials(path)
    write_private(path, f"{OTHER * 4}\n" * 2000)
    with pytest.raises(ConfigError, match="too long"):
        credentials.refresh()
    assert credentials.tokens.may_write(f"Bearer {TOKEN}")
    assert not credentials.tokens.may_read(f"Bearer {OTHER * 4}")


def test_server_credentials_several_invalid_files_are_all_named(tmp_path):
    (tmp_path / "reading").mkdir()
    path, read_path = write_token(tmp_path), write_token(tmp_path / "reading", READING)
    credentials = ServerCredentials(path, read_path)
    for invalid in (path, read_path):
        write_private(invalid, "no token")
    with pytest.raises(ConfigError) as refused:
        credentials.refresh()
    assert str(path) in str(refused.value)
    assert str(read_path) in str(refused.value)


async def test_http_store_refused_token_is_read_again_from_its_file(tmp_path):
    served, known = tmp_path / "served", tmp_path / "known"
    for folder in (served, known):
        folder.mkdir()
    server_file, client_file = write_token(served), write_token(known)
    with OurServer(tmp_path / "root", "--token-file", server_file, "--workers", 1) as server:
        async with opened_url(f"{server.base}?token_file={client_file}") as store:
            assert await store.put(A, block_of("a"))
            replace_token(server_file, f"{OTHER}\n")
            await asyncio.to_thread(
                lambda: until(
                    lambda: ask(server, "GET", "/stats", token=TOKEN)[0] == 401, "it is replaced"
                )
            )
            with pytest.raises(StoreUnavailable, match="401"):
                await read(store, A)
            replace_token(client_file, f"{OTHER}\n")
            failures = store.counters.failures
            one, two = bytearray(FRAME.payload_bytes), bytearray(FRAME.payload_bytes)
            await asyncio.gather(  # both are refused at once
                store.get_into(A, memoryview(one)),
                store.get_into(A, memoryview(two)),
                store.put(B, block_of("b")),
            )
            assert one == two == block_of("a")
            assert await read(store, B) == block_of("b")
            assert store.counters.failures == failures


async def test_store_serve_replaced_certificate_is_used_by_both_sides(tmp_path):
    (tmp_path / "next").mkdir()
    cert, key = make_certificate(tmp_path)
    next_cert, next_key = make_certificate(tmp_path / "next")
    with OurServer(
        *(tmp_path / "root", "--tls-cert", cert, "--tls-key", key, "--workers", 1),
    ) as server:
        ca = tmp_path / "ca.pem"
        ca.write_bytes(cert.read_bytes())

        def shown():
            return ssl.get_server_certificate(("127.0.0.1", server.port)).strip()

        url = f"{server.base}?ca={ca}"
        async with opened_url(url) as store:
            assert await store.put(A, block_of("a"))
            assert shown() == cert.read_text().strip()
            key.write_bytes(next_key.read_bytes())  # for a moment they do not fit together
            cert.write_bytes(next_cert.read_bytes())
            new = next_cert.read_text().strip()
            await asyncio.to_thread(lambda: until(lambda: shown() == new, "the new one is shown"))
            assert await read(store, A) == block_of("a")  # over the connection that is open
            other = parse_sources(url)[0].open(FRAME, depth=2)  # needs a new connection
            with pytest.raises(StoreUnavailable):
                await read(other, A)
            failures = other.counters.failures
            ca.write_bytes(cert.read_bytes())
            assert await read(other, A) == block_of("a")
            assert other.counters.failures == failures
            await other.close()


def test_store_serve_restarted_worker_uses_the_current_tokens(tmp_path):
    path = write_token(tmp_path)
    with OurServer(tmp_path / "root", "--token-file", path, "--workers", 1) as server:
        replace_token(path, f"{OTHER}\n")
        (worker,) = server.workers()
        os.kill(worker, 9)
        until(lambda: server.workers() and worker not in server.workers(), "it is replaced")
        assert ask(server, "GET", "/stats", token=TOKEN)[0] == 401
        assert ask(server, "GET", "/stats", token=OTHER)[0] == 200


HALF = "\ud800"


def test_store_serve_request_facts_with_invalid_text_get_400(tmp_path):
    """Half a surrogate pair, which JSON can hold."""
    with OurServer(tmp_path / "root", "--workers", 1) as server:
        put_description(server)
        put_block(server, "a")
        good = RequestFacts("id", 1, "good", 7).to_json()
        for workload, status in (("good", 204), (HALF, 400), ("good", 204)):
            facts = json.dumps(json.loads(good) | {"workload": workload, "id": f"id{status}"})
            told = ask(server, "POST", touched_path(FRAME.digest), A, {FACTS_HEADER: facts})
            assert told[0] == status, told
        bad_id = json.dumps(json.loads(good) | {"id": HALF})
        headers = {FACTS_HEADER: bad_id}
        assert ask(server, "POST", touched_path(FRAME.digest), A + B, headers)[0] == 400
        assert put_block(server, "b") == 201


def test_store_serve_report_does_not_hold_other_requests(tmp_path, monkeypatch):
    held = Held(ReportedAccesses.report)
    monkeypatch.setattr(ReportedAccesses, "report", lambda *given: held(*given))
    headers = {FACTS_HEADER: RequestFacts("id", 1).to_json()}
    with ServerInProcess(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        path = touched_path(FRAME.digest)
        reporting = pool.submit(ask, server, "POST", path, A, headers)
        assert held.entered.wait(WAIT_S)
        assert ask(server, "GET", STATS)[0] == 200
        assert not reporting.done()
        held.go.set()
        assert reporting.result(WAIT_S)[0] == 204
