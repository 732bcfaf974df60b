"""`/cake/store` without a server."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from registered_hooks import hooks_of
from sglang.srt import runtime_context
from sglang.srt.entrypoints import http_server
from starlette.applications import Starlette
from starlette.testclient import TestClient

from sglang_cake.config import CakeConfig
from sglang_cake.integration import admin_api


class Schedulers:
    """Replicas of a server, as its HTTP process knows them.

    Attributes:
        answers: of each replica to the next change.
        asked: the stores of all changes; None: a detach.
    """

    def __init__(self) -> None:
        self.answers = [SimpleNamespace(success=True, message="")]
        self.asked: list[str | None] = []

    def auto_create_handle_loop(self) -> None:
        pass

    async def attach_hicache_storage_communicator(self, request: Any) -> list[Any]:
        self.asked.append(request.hicache_storage_backend)
        return self.answers

    async def detach_hicache_storage_communicator(self, request: Any) -> list[Any]:
        self.asked.append(None)
        return self.answers


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> Schedulers:
    made = Schedulers()
    state = SimpleNamespace(tokenizer_manager=made)
    monkeypatch.setattr(http_server, "_global_state", state)
    monkeypatch.setattr(
        runtime_context, "get_serving", lambda: SimpleNamespace(admin_api_key="key")
    )
    return made


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, schedulers: Schedulers) -> TestClient:
    app = Starlette()
    monkeypatch.setattr(http_server, "app", app)
    hooks = hooks_of(lambda: admin_api.install(CakeConfig()))
    hooks["_setup_and_run_http_server"]()
    return TestClient(app)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b'["memory://1GB"]',
        b'{"store": null}',
        b'{"store": "memory://1GB", "more": 1}',
        b"[" * 60_000,
        b'{"store":' * 7000,
        b'{"store": "file:///kv/\\ud800"}',
        b"\xff\xfe",
        b'{"store": ' + b"1" * 6000 + b"}",
    ],
)
def test_put_store_malformed_body_is_answered_by_what_to_send(
    client: TestClient, schedulers: Schedulers, body: bytes
) -> None:
    reply = client.put(admin_api.PATH, content=body)
    assert (reply.status_code, reply.json()) == (400, {"error": 'send {"store": "URL[,URL...]"}'})
    assert schedulers.asked == []


def test_put_store_null_character_in_a_path_is_refused(
    client: TestClient, schedulers: Schedulers
) -> None:
    for url in ("file:///kv\0/a", "file:///kv%00", "memory://1GB,file:///kv\0"):
        reply = client.put(admin_api.PATH, json={"store": url})
        assert reply.status_code == 400
        assert "names no folder" in reply.json()["error"]
    assert schedulers.asked == []


@pytest.mark.parametrize(
    ("refusals", "error"),
    [
        (["no memory"], "no memory"),
        (["no memory", "cake is off"], "no memory; cake is off"),
        (["", "no memory", ""], "no memory; 2 of 3 replicas have changed: send it again"),
    ],
)
@pytest.mark.parametrize("verb", ["PUT", "DELETE"])
def test_change_store_that_replicas_refuse_tells_how_many_have_changed(
    client: TestClient, schedulers: Schedulers, verb: str, refusals: list[str], error: str
) -> None:
    before = client.get(admin_api.PATH).json()
    schedulers.answers = [SimpleNamespace(success=not why, message=why) for why in refusals]
    reply = client.request(verb, admin_api.PATH, json={"store": "memory://64MB"})
    assert (reply.status_code, reply.json()) == (400, {"error": error})
    assert client.get(admin_api.PATH).json() == before
