"""The configurations of nginx in docs/http-store.md#other-servers."""

import re
from pathlib import Path

import pytest
from http_servers import (
    TOKEN,
    A,
    B,
    Nginx,
    OurServer,
    ask,
    framed,
    metrics,
    opened_client,
    own_token,
    write_token,
)

from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.stores.base import RequestFacts
from sglang_cake.stores.http.protocol import block_path
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.store_contract import FRAME, block_of, read

PAGE = Path(__file__).parents[3] / "docs/http-store.md"
PATH = block_path(FRAME.digest, A)


@pytest.fixture
def served(tmp_path):
    """Starts nginx with a configuration of the page, over `tmp_path/root`."""
    (tmp_path / "nginx").mkdir()
    blocks = re.findall(r"^```nginx\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)

    def start(text, token, store=""):
        def configuration(port):
            changes = {
                "root /data/kv;": f"root {tmp_path}/root;",
                "Bearer TOKEN": f"Bearer {token}",
                **({"http://127.0.0.1:8700": store} if store else {}),
            }
            changed = re.sub(r"listen \d+;", f"listen 127.0.0.1:{port};", text)
            for old, new in changes.items():
                assert old in changed
                changed = changed.replace(old, new)
            return changed

        return Nginx(tmp_path / "nginx", tmp_path / "root", servers=configuration)

    alone, in_front = blocks
    return lambda token, store="": start(in_front if store else alone, token, store)


async def test_http_store_on_nginx_as_documented_needs_the_token(tmp_path, served):
    nginx = served(TOKEN)
    assert ask(nginx, "PUT", PATH, framed("a"), token=TOKEN)[0] == 201
    for token in (None, "another-token-of-enough-characters"):
        assert ask(nginx, "PUT", PATH, framed("a"), token=token)[0] == 401
        assert ask(nginx, "GET", PATH, token=token)[0] == 401
        assert ask(nginx, "DELETE", PATH, token=token)[0] == 401
        async with opened_client(nginx.base, token=token) as store:
            with pytest.raises(StoreUnavailable, match=r"401.*\?token_file="):
                await store.contains([A])
    async with opened_client(nginx.base, token=TOKEN) as store:
        assert await store.contains([A, B]) == [True, False]
        assert await store.put(B, block_of("b"))
        assert await read(store, B) == block_of("b")
        await store.delete(B)
        assert await store.contains([A, B]) == [True, False]
    parse_sources(f"{nginx.base}?token_file={write_token(tmp_path)}")[0].check()
    with pytest.raises(ConfigError, match="401"):
        parse_sources(nginx.base)[0].check()


async def test_store_serve_behind_nginx_as_documented_keeps_its_duties(tmp_path, served):
    with OurServer(tmp_path / "root", "--capacity", "64MB") as server:
        nginx = served(own_token(), server.base)
        async with opened_client(nginx.base) as store:
            assert await store.put(A, block_of("a"))
            assert await store.put(A, block_of("a")) is False
            assert await store.contains([A, B]) == [True, False]
            assert await read(store, A) == block_of("a")
            assert metrics(server)["sent_bytes_total"] == 0, "nginx has sent it"
            await store.on_access([A], RequestFacts("id", 1))
            assert [block.key async for block in store.list_blocks()] == [A]
            assert (await store.stats()).capacity_bytes == 64_000_000
            for token in (None, TOKEN):
                for method in ("GET", "HEAD", "PUT", "DELETE"):
                    body = framed("a") if method == "PUT" else None
                    assert ask(nginx, method, PATH, body, token=token)[0] == 401
            bad = framed("a")[:-1] + b"x"
            assert ask(nginx, "PUT", block_path(FRAME.digest, B), bad)[0] == 400
            await store.delete(A)
            assert await store.contains([A]) == [False]
            assert ask(nginx, "GET", PATH)[0] == 404


async def test_store_serve_second_token_reads_through_nginx_too(tmp_path, served):
    """nginx does not know it, so the server sends the block."""
    (tmp_path / "readers").mkdir()
    readers = write_token(tmp_path / "readers", TOKEN)
    with OurServer(tmp_path / "root", "--read-token-file", readers) as server:
        nginx = served(own_token(), server.base)
        async with opened_client(nginx.base) as store:
            assert await store.put(A, block_of("a"))
        async with opened_client(nginx.base, token=TOKEN) as store:
            assert await read(store, A) == block_of("a")
        assert metrics(server)["sent_bytes_total"] > 0
