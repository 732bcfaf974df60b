"""Loaded tokens are `storage` wherever SGLang says where cached tokens came from."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from live import BLOCK, CHUNK, DEADLINE_S, Live
from polling import until

Make = Callable[[int], list[int]]


def details(device: int, storage: int) -> dict[str, Any]:
    return {"device": device, "host": 0, "storage": storage, "storage_backend": "file"}


def by_source(live: Live) -> dict[str, float]:
    """SGLang's own counter."""
    found = {"device": 0.0, "storage": 0.0}
    for line in requests.get(live.url + "/metrics", timeout=DEADLINE_S).text.splitlines():
        if line.startswith("sglang:cached_tokens_total{"):
            (source,) = (name for name in found if f'cache_source="{name}"' in line)
            found[source] += float(line.rpartition(" ")[2])
    return found


def test_cached_tokens_matched_is_device_and_loaded_is_storage(loading: Live, prompt: Make) -> None:
    ids = prompt(12 * BLOCK)
    loading.ask_and_store(ids)
    loading.ask_flushed(ids[: 4 * BLOCK])  # in memory now, and loaded itself
    before = by_source(loading)
    answer = loading.ask(ids + prompt(7))
    assert answer.cached == 12 * BLOCK
    assert answer.meta["cached_tokens_details"] == details(4 * BLOCK, 8 * BLOCK)
    after = {"device": before["device"] + 4 * BLOCK, "storage": before["storage"] + 8 * BLOCK}
    until(lambda: by_source(loading) == after, "SGLang's counter")


def test_cached_tokens_of_a_raced_prompt_count_loads_as_storage(both: Live, prompt: Make) -> None:
    """Islands join a request that runs as well as one that waits."""
    ids = prompt(30 * BLOCK)
    both.ask_and_store(ids)
    for tail in (0, 2 * CHUNK + 9):
        question = ids + prompt(tail)

        def loaded(question: list[int] = question) -> int:
            answer = both.ask_flushed(question)
            assert answer.cached == answer.loaded
            found = details(0, answer.loaded) if answer.loaded else None  # as SGLang
            assert answer.meta["cached_tokens_details"] == found
            return answer.loaded

        until(loaded, "a part of it is loaded, which speed decides")


def _stream(live: Live, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with requests.post(
        live.url + path, json=body | {"stream": True}, stream=True, timeout=DEADLINE_S
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def test_cached_tokens_every_stream_chunk_has_the_details(loading: Live, prompt: Make) -> None:
    ids = prompt(6 * BLOCK)
    loading.ask_and_store(ids)
    loading.flush()
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    chunks = list(_stream(loading, "/generate", {"input_ids": ids, "sampling_params": sampling}))
    found = [chunk["meta_info"]["cached_tokens_details"] for chunk in chunks]
    loaded = chunks[-1]["meta_info"]["cake"]["loaded_tokens"]
    assert loaded >= 5 * BLOCK
    assert found == [details(0, loaded)] * len(chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_cached_tokens_openai_endpoints_report_loads_as_storage(
    loading: Live, prompt: Make, chat: bool, stream: bool
) -> None:
    text = "".join(chr(ord("a") + token % 26) for token in prompt(10 * BLOCK))
    question = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"model": "default", "temperature": 0, "max_tokens": 3, "ignore_eos": True, **question}
    body["return_cached_tokens_details"] = True

    def ask() -> dict[str, Any]:
        if not stream:
            reply = loading.post(path, **body)
            assert reply.status_code == 200, reply.text
            return dict(reply.json())
        merged: dict[str, Any] = {}
        for chunk in _stream(loading, path, body | {"stream_options": {"include_usage": True}}):
            merged |= {name: value for name, value in chunk.items() if value}
        return merged

    stored = loading.metric("stored_blocks_total")
    ask()
    until(lambda: loading.metric("stored_blocks_total") >= stored + 10, "stored")
    loading.flush()
    warm = ask()
    loaded = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert loaded >= 9 * BLOCK
    assert warm["sglext"]["cached_tokens_details"] == details(0, loaded)


def test_cached_tokens_chat_has_the_whole_meta_info_if_asked(loading: Live, prompt: Make) -> None:
    text = "".join(chr(ord("a") + token % 26) for token in prompt(10 * BLOCK))
    body = {"model": "default", "max_tokens": 3, "messages": [{"role": "user", "content": text}]}
    reply = loading.post("/v1/chat/completions", **body, return_meta_info=True)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert choice["meta_info"]["cake"]["computed_tokens"] > 0
    plain = loading.post("/v1/chat/completions", **body).json()
    assert "meta_info" not in plain["choices"][0]
    assert "sglext" not in plain
