"""Where draft models keep their KV: in the target's slots, in those of its sliding windows and
recurrent states, or in rings of requests, which are not stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.memory.pool_planes import moves_slots


@dataclass(frozen=True, slots=True)
class DraftPools:
    """The pools of draft models, in the order of the models. SGLang owns them.

    Attributes:
        rows: with a row for each slot of the target. Blocks have them.
        windows: with a row for each slot of the target's sliding windows. End states have them.
        states: of recurrent states, with a row for each of the target's. End states have them.
    """

    rows: tuple[Any, ...] = ()
    windows: tuple[Any, ...] = ()
    states: tuple[Any, ...] = ()

    @classmethod
    def of(cls, pools: Sequence[Any], target: Any, *, states: Sequence[Any] = ()) -> "DraftPools":
        """
        Args:
            pools: one for each draft model.
            target: the pool of the model itself.
            states: pools of the draft models' own recurrent states.

        Raises: ConfigError, one line, if a pool has its rows elsewhere.
        """
        rows: list[Any] = []
        windows: list[Any] = []
        for pool in pools:
            if getattr(pool, "swa_req_ring_size", None) is not None:
                continue  # rings of requests, which SGLang begins anew (`window_replay`)
            window = getattr(pool, "swa_kv_pool", None)
            if window is None:
                has_index = hasattr(pool, "qsa_compressed_k_buffer_pool")
                # A hybrid's pool has the states of the target beside its rows.
                rows.append(pool if has_index else getattr(pool, "full_kv_pool", pool))
                continue
            sums = (*getattr(pool, "compress_state_pools", ()),)
            mapping = getattr(target, "full_to_swa_index_mapping", None)
            # In the memory of all pools, a draft model has its rows beside those of the target.
            is_beside = moves_slots(pool) or pool.full_to_swa_index_mapping is mapping is not None
            if pool.swa_uses_full_indices:
                rows.append(window)
            elif window.layer_num:
                if not is_beside or any(sums):
                    raise ConfigError(
                        f"cake does not support a draft model with a {type(pool).__name__} of its "
                        "own slots: remove --speculative-algorithm"
                    )
                windows.append(window)
            full = getattr(pool, "full_kv_pool", None)
            if full is not None and full.layer_num:
                rows.append(full)
        return cls(tuple(rows), tuple(windows), tuple(states))
