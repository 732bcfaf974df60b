"""The seed of the keys of a request."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_cake.integration.request.request_keys import seed_of

NAMESPACE = b"n" * 32


def _seed(lora_id: str | None, extra_key: str, adapter: str | None = "content") -> bytes:
    req: Any = SimpleNamespace(lora_id=lora_id, extra_key=extra_key, cache_salt=None)
    return seed_of(req, NAMESPACE, adapter).digest()


@pytest.mark.parametrize("of_size", ["", "|elastic_ep_size=8"])
def test_seed_of_one_adapter_loaded_again_is_the_same(of_size: str) -> None:
    """SGLang appends the number of ranks behind the id, with elastic expert parallelism."""
    first, second = "a" * 32, "b" * 32
    one = _seed(first, f"tenant{first}{of_size}")
    assert one == _seed(second, f"tenant{second}{of_size}")
    assert one != _seed(first, f"other{first}{of_size}")
    assert one != _seed(first, f"tenant{first}{of_size}", "other content")


def test_seed_of_other_numbers_of_elastic_ranks_are_all_different() -> None:
    seeds = {
        _seed("a" * 32, "tenant" + "a" * 32 + of_size)
        for of_size in ("", "|elastic_ep_size=8", "|elastic_ep_size=7")
    }
    assert len(seeds) == 3
