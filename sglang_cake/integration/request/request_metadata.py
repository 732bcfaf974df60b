"""What a request is, and what the store may know of it."""

import functools
import hashlib
import hmac
import logging
import secrets
from array import array
from typing import TYPE_CHECKING

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.keys import Digest, KeySeed
from sglang_cake.core.secret_file import make_secret_file, own_secret_path, read_key
from sglang_cake.loading.cost_model import Costs
from sglang_cake.stores.eviction import Benefit
from sglang_cake.stores.request_info import MOST_WORKLOAD, RequestFacts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger("sglang_cake")

FIELD = "cake_workload"  # of a request's `custom_params`
# "late": its last step waits until all KV is there. That is how a benchmark compares the two.
LAST_STEP = "cake_last_step"
_PROCESS = secrets.token_hex(8)  # many servers may share a store


def keyable(req: "Req") -> bool:
    """Whether the request's token ids alone say what its KV is."""
    return (
        req.input_embeds is None
        and req.positional_embed_overrides is None
        and req.multimodal_inputs is None
        and req.session is None
    )


def seed_of(req: "Req", namespace: Digest, adapter: str | None) -> KeySeed:
    """What its keys start from.

    Args: adapter: what its LoRA adapter holds, if it has one.
    """
    extra_key = req.extra_key
    if req.lora_id is not None:
        # SGLang appends an id made of the adapter's name and path, which says nothing about its
        # weights: those take its place.
        extra_key = (extra_key or "").removesuffix(req.lora_id) or None
    return KeySeed(namespace, extra_key, req.cache_salt or None, adapter)


def tenant_of(req: "Req") -> int:
    """Whose request it is, as a number that does not say who; 0: nobody's in particular.

    A store learns these numbers. They are keyed, so that nobody there can test guesses of salts.
    """
    tenant = req.cache_salt or req.extra_key
    if not tenant:
        return 0
    digest = hmac.digest(tenant_key(), tenant.encode(errors="surrogatepass"), "sha256")
    return int.from_bytes(digest[:8]) >> 1


@functools.cache
def tenant_key() -> bytes:
    """32 bytes that this user's servers on this machine share; the process's own if they cannot."""
    hint = "tenants have other numbers in each process"
    try:
        path = own_secret_path("tenant-key", hint=hint)
        make_secret_file(path, name="tenant key", hint=hint)
        return read_key(path, name="tenant key", hint=hint)
    except ConfigError as error:
        logger.warning("cake: %s", error)
        return secrets.token_bytes(32)


def begins_early(req: "Req") -> bool:
    """Whether the request's last step may begin before its last loads are over."""
    given = req.sampling_params.custom_params
    return not (isinstance(given, dict) and given.get(LAST_STEP) == "late")


def facts_of(
    req: "Req", ticket: str, tokens: "array[int]", costs: Costs, block_tokens: int
) -> RequestFacts:
    """What the store is told. Ids and salts are hashed: it learns who is the same, not who it is.

    Args: ticket: names this load in this process.
    """
    given = req.sampling_params.custom_params
    workload = given.get(FIELD) if isinstance(given, dict) else None
    return RequestFacts(
        id=_digest(f"{_PROCESS}{ticket}").hex(),
        tokens=len(tokens),
        workload=_text(workload)[:MOST_WORKLOAD] if isinstance(workload, str) else "",
        tenant=tenant_of(req),
        benefit=_benefit(costs, block_tokens),
    )


def _benefit(costs: Costs, block_tokens: int) -> Benefit | None:
    prefill = costs.prefill
    try:
        return Benefit(block_tokens, prefill.token_s, prefill.pair_s, costs.load.block_s)
    except ValueError:  # nothing measured, or a fit that cannot be: the store keeps what it has
        return None


def _text(given: str) -> str:
    """What of a user's text UTF-8 can hold; `sglang.Engine` takes any."""
    return given.encode(errors="replace").decode()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]
