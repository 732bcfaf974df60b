"""A server whose encoders are servers of their own (`--language-only`)."""

from collections.abc import Callable
from pathlib import Path

from live import BLOCK, Start, assert_same, check_wrong_kv_is_noticed
from test_multimodal import FLAGS, PAD, VOCAB, build_qwen_vl

from sglang_cake.demo.sglang_server import free_port

Make = Callable[[int], list[int]]


def test_language_only_server_prompt_of_text_is_loaded_and_gives_the_answer_of_computing(
    start: Start, folder: Path, standins: dict[str, str], prompt: Make
) -> None:
    model = build_qwen_vl(
        folder / "qwen-vl-language" / "model", hidden=128, layers=4, heads=4, vocab=VOCAB
    )
    flags = (
        *(*FLAGS, "--cake-mode", "load", "--language-only"),
        *("--encoder-bootstrap-port", str(free_port())),
        *("--encoder-transfer-backend", "zmq_to_tokenizer"),
    )
    env = {**standins, "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "cake_test_images"}
    ids = [token % PAD for token in prompt(10 * BLOCK + 7)]
    with start(model, flags, store=folder / "store-language", env=env) as live:
        computed = live.ask(ids)
        assert computed.loaded == 0
        assert live.store is not None
        files = live.store.until_stored(ids)
        loaded = live.ask_flushed(ids)
        assert loaded.loaded == 10 * BLOCK
        assert_same(loaded, computed)
        check_wrong_kv_is_noticed(files, lambda: live.ask_flushed(ids), computed)
