"""Facts about a request: its tenant, its settings, and facts for the store."""

import functools
import hashlib
import hmac
import logging
import secrets
from array import array
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.secret_file import make_secret_file, own_secret_path, read_key
from sglang_cake.loading.cost_model import PromptCosts
from sglang_cake.stores.base import MOST_WORKLOAD, RequestFacts
from sglang_cake.stores.eviction.policy import Benefit

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger("sglang_cake")

# Fields of a request's `custom_params`:
FIELD = "cake_workload"
LAST_STEP = "cake_last_step"  # "late": the last step waits for all KV; benchmarks compare with that
_PROCESS = secrets.token_hex(8)  # servers that share a store must not use the same ids


def tenant_of(req: "Req") -> int:
    """An anonymous number of the request's tenant; 0: the request names none.

    A store learns these numbers. They are keyed, so that guesses of salts cannot be tested there.
    """
    tenant = req.cache_salt or req.extra_key
    if not tenant:
        return 0
    digest = hmac.digest(tenant_key(), tenant.encode(errors="surrogatepass"), "sha256")
    return int.from_bytes(digest[:8]) >> 1


@functools.cache
def tenant_key() -> bytes:
    """32 bytes that this user's servers on this machine share. Where the file cannot be used, they
    are this process's own."""
    hint = "tenants have other numbers in each process"
    try:
        path = own_secret_path("tenant-key", hint=hint)
        make_secret_file(path, name="tenant key", hint=hint)
        return read_key(path, name="tenant key", hint=hint)
    except ConfigError as error:
        logger.warning("cake: %s", error)
        return secrets.token_bytes(32)


def may_overlap_last_step(req: "Req") -> bool:
    """Whether the request's last step may begin before its last loads are over."""
    given = req.sampling_params.custom_params
    return not (isinstance(given, dict) and given.get(LAST_STEP) == "late")


def reads_prompt(req: "Req") -> bool:
    """Whether the response has data of tokens of the prompt: their log probabilities or states."""
    logprobs = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    return bool(logprobs or req.return_hidden_states is True)


def most_slots(req: "Req") -> int:
    """Slots that a request may need until its end, as SGLang estimates, if none is in the tree."""
    new: int = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    return int(len(req.origin_input_ids) + len(req.output_ids) + min(new, CLIP_MAX_NEW_TOKENS))


def facts_of(
    req: "Req", load_id: str, tokens: "array[int]", costs: PromptCosts | None, block_tokens: int
) -> RequestFacts:
    """The facts for the store. Ids and salts are hashed: the store can compare them and not read
    them.

    Args:
        load_id: names this request in this process.
        costs: as measured; None: the store keeps those that it has.
    """
    given = req.sampling_params.custom_params
    workload = given.get(FIELD) if isinstance(given, dict) else None
    return RequestFacts(
        id=_digest(f"{_PROCESS}{load_id}").hex(),
        tokens=len(tokens),
        workload=_text(workload)[:MOST_WORKLOAD] if isinstance(workload, str) else "",
        tenant=tenant_of(req),
        benefit=_benefit(costs, block_tokens),
    )


def _benefit(costs: PromptCosts | None, block_tokens: int) -> Benefit | None:
    if costs is None:
        return None
    prefill = costs.prefill
    try:
        return Benefit(block_tokens, prefill.token_s, prefill.pair_s, costs.load.block_s)
    except ValueError:  # the fit is unusable
        return None


def _text(given: str) -> str:
    """A user's text without what UTF-8 cannot hold; `sglang.Engine` takes any text."""
    return given.encode(errors="replace").decode()


def _digest(text: str) -> bytes:
    """A digest of any text: clients choose ids, which may have half a surrogate pair in JSON."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:16]
