"""What a store's rates mean for a model: tokens a second, and against computing them. Pure."""

from dataclasses import dataclass

from sglang_cake.cli.store_tables import count_text, exact_size_text, size_text


@dataclass(frozen=True, slots=True)
class Meaning:
    """A store and a model together; rates are per second."""

    kv_bytes_per_token: int
    block_tokens: int
    read_bytes_per_s: float
    loaded_tokens_per_s: float
    prefill_tokens_per_s: float | None
    load_speedup: float | None  # loading alone, against computing alone
    both_speedup: float | None  # both at once, at best
    break_even_bytes_per_s: float | None  # where loading takes as long as computing


def meaning(
    *,
    kv_bytes_per_token: int,
    block_tokens: int,
    read_bytes_per_s: float,
    prefill_tokens_per_s: float | None,
) -> Meaning:
    """Computing and loading at once add up: of `n` tokens, both are done after
    `n / (loaded_tokens_per_s + prefill_tokens_per_s)` seconds, if a prompt's later tokens cost as
    much as its first ones. They cost more, and loading takes them first."""
    loaded = read_bytes_per_s / kv_bytes_per_token
    prefill = prefill_tokens_per_s
    return Meaning(
        kv_bytes_per_token=kv_bytes_per_token,
        block_tokens=block_tokens,
        read_bytes_per_s=read_bytes_per_s,
        loaded_tokens_per_s=loaded,
        prefill_tokens_per_s=prefill,
        load_speedup=None if prefill is None else loaded / prefill,
        both_speedup=None if prefill is None else 1 + loaded / prefill,
        break_even_bytes_per_s=None if prefill is None else prefill * kv_bytes_per_token,
    )


def tell(found: Meaning) -> list[str]:
    """The same in words, a line each."""
    block_bytes = found.kv_bytes_per_token * found.block_tokens
    lines = [
        f"a token's KV is {exact_size_text(found.kv_bytes_per_token)}, "
        f"a block of {found.block_tokens} tokens {exact_size_text(block_bytes)}",
        f"this store loads at best {count_text(found.loaded_tokens_per_s)} tokens/s "
        f"({size_text(found.read_bytes_per_s)}/s)",
    ]
    if (
        found.load_speedup is not None
        and found.both_speedup is not None
        and found.break_even_bytes_per_s is not None
    ):
        lines += [
            f"against a prefill of {count_text(found.prefill_tokens_per_s)} tokens/s: "
            f"loading alone is {found.load_speedup:.2f} times as fast, "
            f"both at once up to {found.both_speedup:.2f} times",
            f"loading alone breaks even at {size_text(found.break_even_bytes_per_s)}/s",
        ]
    return lines
