"""`meta_info["cake"]` beside SGLang's own way with extra information, in answers and in streams."""

from types import SimpleNamespace
from typing import Any

import pytest
from registered_hooks import hooks_of
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_cake.integration.response_stats import install_meta_info

HOOKS = hooks_of(install_meta_info)
STATISTICS = {"loaded_tokens": 1280}
OTHER = "of_another_plugin"


def output(state: Any, offset: int, **told: list[Any]) -> dict[str, Any]:
    """The `meta_info` of one output of a request, after the hook.

    Args:
        offset: tokens that a stream has sent before.
        told: extra information since then, an item per token.
    """
    meta_info: dict[str, Any] = {}
    manager = SimpleNamespace(
        _accumulate_request_meta_info=TokenizerManager._accumulate_request_meta_info
    )
    info = {key: [values] for key, values in told.items()}
    TokenizerManager.update_request_meta_info(manager, meta_info, state, info, 0, None)
    HOOKS["update_request_meta_info"](None, manager, meta_info, state, info, 0, None)
    tokenizer_manager._slice_streaming_output_meta_info(
        meta_info, offset, state.customized_info_accumulated.keys()
    )
    return meta_info


@pytest.fixture
def state() -> Any:
    return SimpleNamespace(customized_info_accumulated={}, customized_info_reported_keys=set())


def test_statistics_are_in_every_chunk_of_an_incremental_stream(state: Any) -> None:
    first = output(state, 0, cake=[STATISTICS], **{OTHER: [1]})
    second = output(state, 1, cake=[], **{OTHER: [2, 3]})
    assert first == {"cake": STATISTICS, OTHER: [1]}
    assert second == {"cake": STATISTICS, OTHER: [2, 3]}


def test_statistics_survive_chunks_that_are_joined(state: Any) -> None:
    chunks = [
        {"meta_info": output(state, 0, cake=[STATISTICS]), "output_ids": [5]},
        {"meta_info": output(state, 1, cake=[]), "output_ids": [6, 7]},
    ]
    joined = TokenizerManager._coalesce_streaming_chunks(
        SimpleNamespace(), chunks, "id", state.customized_info_accumulated.keys()
    )
    assert joined["meta_info"]["cake"] == STATISTICS
    assert joined["output_ids"] == [5, 6, 7]


def test_requests_without_statistics_have_no_entry(state: Any) -> None:
    """SGLang pads the lists of a batch in which another request has some."""
    assert output(state, 0, cake=[None, None]) == {}
    assert output(state, 2, cake=[]) == {}
