"""Every endpoint of a server, with prompts that are in the store.

The server loads all that is stored: endpoints do not depend on the mode.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import requests
from live import BLOCK, DEADLINE_S, Live, assert_same, request
from polling import until

from sglang_cake.demo.sglang_server import generate

Make = Callable[[int], list[int]]


@pytest.fixture
def text(prompt: Make) -> str:
    """A long text of one token per character. Each test has its own."""
    return "".join(chr(ord("a") + token % 26) for token in prompt(10 * BLOCK))


def _text_ids(live: Live, text: str) -> list[int]:
    return list(live.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"])


def test_streaming_gives_the_same_tokens_and_the_statistics(
    loading: Live, plain: Live, prompt: Make
) -> None:
    ids = prompt(14 * BLOCK)
    loading.ask_and_store(ids)
    loading.flush()
    reply = generate(loading.url, ids, max_new_tokens=12)
    assert reply.output_ids == plain.reference(ids, 12).tokens
    assert reply.cake["loaded_tokens"] > 0
    assert set(reply.cake) >= {"computed_tokens", "loaded_tokens", "matched_tokens", "meet_token"}


def test_generate_endpoint_three_samples_equal_the_plain_server(
    loading: Live, plain: Live, prompt: Make
) -> None:
    ids = prompt(12 * BLOCK + 3)
    loading.ask_and_store(ids)
    loading.flush()
    before = loading.metric("loaded_tokens_total")
    samples = loading.post("/generate", **request(ids, sampling={"n": 3})).json()
    assert [s["output_ids"] for s in samples] == [plain.reference(ids).tokens] * 3
    # SGLang first fills the tree by a request of its own, and that request loads.
    until(lambda: loading.metric("loaded_tokens_total") > before, "tokens were loaded")


def test_generate_endpoint_batch_equals_the_plain_server(
    loading: Live, plain: Live, prompt: Make
) -> None:
    shared = prompt(8 * BLOCK)
    batch = [shared + prompt(n) for n in (3, 80)] + [prompt(30)]
    loading.ask_and_store(shared)
    loading.flush()
    sampling = request(shared)["sampling_params"]
    answers = loading.post("/generate", input_ids=batch, sampling_params=sampling).json()
    assert [a["output_ids"] for a in answers] == [plain.reference(ids).tokens for ids in batch]


def _completion(live: Live, body: dict[str, Any], path: str) -> dict[str, Any]:
    body = {"model": "default", "temperature": 0, "max_tokens": 8, "ignore_eos": True, **body}
    reply = live.post(path, **body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_openai_endpoints_stored_prompt_gives_the_plain_answer(
    loading: Live, plain: Live, text: str, kind: str
) -> None:
    chat = kind.startswith("chat")
    question = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    cold = _completion(loading, question, f"/v1/{kind}")
    # A chat template puts a few tokens around the text, so its keys are not known here: the
    # blocks are stored when a flushed server loads them.
    loading.store.until_stored([] if chat else _text_ids(loading, text))
    loading.flush()
    before = loading.metric("loaded_tokens_total")
    warm = _completion(loading, question, f"/v1/{kind}")
    reference = _completion(plain, question, f"/v1/{kind}")

    def said(body: dict[str, Any]) -> Any:
        choice = body["choices"][0]
        return choice["message"]["content"] if chat else choice["text"]

    assert said(cold) == said(warm) == said(reference)
    if not chat:
        until(lambda: loading.metric("loaded_tokens_total") > before, "tokens were loaded")


def test_openai_endpoint_streaming_gives_the_plain_text(
    loading: Live, plain: Live, text: str
) -> None:
    def stream(live: Live) -> str:
        body = {
            "model": "default",
            "prompt": text,
            "temperature": 0,
            "max_tokens": 8,
            "stream": True,
            "ignore_eos": True,
        }
        with requests.post(
            live.url + "/v1/completions", json=body, stream=True, timeout=DEADLINE_S
        ) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith(b"data: {")]
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

    cold = stream(loading)
    loading.store.until_stored(_text_ids(loading, text))
    loading.flush()
    assert stream(loading) == cold == stream(plain)


def test_frontend_program_on_a_stored_text_gives_the_plain_text(
    loading: Live, plain: Live, text: str
) -> None:
    """gen, fork and several turns: the same answers twice, and the second time from the store."""
    import sglang as sgl

    @sgl.function
    def program(s: Any) -> None:
        s += text
        s += sgl.gen("first", max_tokens=6, temperature=0, ignore_eos=True)
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f" branch {i}: "
            fork += sgl.gen("branch", max_tokens=6, temperature=0, ignore_eos=True)
        s += "".join(fork["branch"] for fork in forks)
        s += sgl.gen("last", max_tokens=6, temperature=0, ignore_eos=True)

    def run(live: Live) -> str:
        return str(program.run(backend=sgl.RuntimeEndpoint(live.url)).text())

    cold = run(loading)
    loading.store.until_stored(_text_ids(loading, text))
    loading.flush()
    assert run(loading) == cold == run(plain)


def test_cache_salt_and_extra_key_load_only_their_own_blocks(
    loading: Live, plain: Live, prompt: Make
) -> None:
    ids = prompt(6 * BLOCK + 1)
    loading.ask_and_store(ids)
    reference = plain.reference(ids)
    for extra in ({"cache_salt": "mine"}, {"extra_key": "mine"}, {"cache_salt": "other"}):
        answer = loading.ask_flushed(ids, **extra)
        assert_same(answer, reference)
        assert (answer.loaded, answer.cached) == (0, 0)
    loading.store.until_stored(ids, cache_salt="mine")
    loading.store.until_stored(ids, extra_key="mine")
    again = loading.ask_flushed(ids, cache_salt="mine")
    assert_same(again, reference)
    assert again.loaded > 0
