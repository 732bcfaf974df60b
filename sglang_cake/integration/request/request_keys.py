"""Which keys name the KV of a request, if any do."""

import hashlib
import re
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Digest, KeyChain, KeySeed
from sglang_cake.integration.request.media import media_numbers, media_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Attribute of a request whose extra key has been changed. It may arrive again after a retraction.
_CHANGED = "cake_extra_key_changed"


class RequestKeys:
    """The keys of requests. A request has none if they would not cover all that its KV depends on,
    or if the tree may give it KV that they do not name.

    Args:
        adapter: `(lora_id)` gives the digest of that LoRA adapter's content; None: not known.
        end_rank: as for `KeyChain`.

    Attributes:
        covers_media: keys may cover the media of this model (`support_matrix.keys_media`).
        next_tokens: as for `KeyChain`.
        namespace: digest that seeds every key; None: not known, so no request has keys.
        suspended: the tree has KV of another namespace, so no request has keys.
    """

    def __init__(
        self,
        block_tokens: int,
        adapter: Callable[[str], str | None],
        counters: Counters,
        *,
        next_tokens: int = 0,
        end_rank: tuple[int, int] = (0, 1),
        covers_media: bool = False,
    ) -> None:
        self._block_tokens = block_tokens
        self._adapter = adapter
        self._counters = counters
        self._end_rank = end_rank
        # LoRA adapters of which the tree has KV that may be of other files or weights.
        self._foreign_adapters: set[str] = set()
        self.next_tokens = next_tokens
        self.covers_media = covers_media
        self.namespace: Digest | None = None
        self.suspended = False

    def chain(self, req: "Req", *, counted: bool = True) -> KeyChain | None:
        """The keys of a request; None: it has none, and that is counted."""
        media = media_of(req)
        if (reason := unkeyed_because(req)) is not None or media is None:
            if counted:
                self._counters.add("unkeyed_requests", label=reason or "media")
            return None
        seed = None if self.has_foreign_kv(req) else self._seed(req)
        if seed is None:
            if counted:
                self._counters.add("unnamed_requests")
            return None
        return KeyChain(seed, self._block_tokens, media, self.next_tokens, self._end_rank)

    def prompt_digest(
        self, req: "Req", tokens: "array[int]", key_chain: KeyChain | None
    ) -> bytes | None:
        """32 bytes for all that the KV of `tokens` depends on; None: the namespace is not known.

        Without keys they stand for the tokens alone: media, which each process numbers anew, count
        as equal. SGLang's tree may give KV of the text before them to other requests.
        """
        if key_chain is not None:
            return key_chain.prefix_digest(tokens)
        if (seed := self._seed(req)) is None:
            return None
        numbers = np.frombuffer(tokens, np.int64)
        text = np.where(numbers < media_numbers(), numbers, -1)
        return hashlib.sha256(b"sglang_cake tokens v1" + seed.digest() + text.tobytes()).digest()

    def weights_digest(self, req: "Req") -> bytes | None:
        """32 bytes for the namespace of a request, and for its LoRA adapter; None: not known."""
        if req.lora_id is None or self.namespace is None:
            return self.namespace
        adapter = self._adapter(req.lora_id)
        return None if adapter is None else KeySeed(self.namespace, adapter=adapter).digest()

    def has_foreign_kv(self, req: "Req") -> bool:
        """Whether the tree may give a request KV that its keys do not name."""
        return self.suspended or req.lora_id in self._foreign_adapters

    def adapter_is_foreign(self, lora_id: str) -> bool:
        """The tree has KV of this adapter from now on that may be of other files or weights.
        Returns whether that is new."""
        is_new = lora_id not in self._foreign_adapters
        self._foreign_adapters.add(lora_id)
        return is_new

    def rebase(self, namespace: Digest | None, *, suspended: bool) -> None:
        """From now on KV means something else. Args: as of the attributes."""
        self.namespace = namespace
        self.suspended = suspended

    def emptied(self) -> None:
        """The tree is empty."""
        self.suspended = False
        self._foreign_adapters.clear()

    def _seed(self, req: "Req") -> KeySeed | None:
        """The start of the keys of a request; None: not known."""
        adapter = None if req.lora_id is None else self._adapter(req.lora_id)
        if self.namespace is None or (req.lora_id and adapter is None):
            return None
        return seed_of(req, self.namespace, adapter)


def unkeyed_because(req: "Req") -> str | None:
    """The reason why keys do not cover this request, as a label of the metric. None: there is no
    such reason; `media.media_of` decides about its images."""
    if req.session is not None:
        return "session"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "embeddings"
    return None


def keep_apart_from_adapters(req: "Req") -> None:
    """Change the extra key of a request without an adapter, if it could be one of SGLang's own.

    SGLang's tree keeps KV of an adapter under the extra key and the adapter's id. A client may send
    that id as extra key: name and path give away the ids of `--lora-paths`. The KV of the bare
    model would be taken for the adapter's then, and be stored under the keys of its content.
    """
    # The slash is appended behind other slashes too, or two keys of clients would become one.
    last = (req.extra_key or "").rstrip("/").rpartition("/")[2]
    if req.lora_id is None and re.search("[0-9a-f]{32}", last) and not hasattr(req, _CHANGED):
        req.extra_key += "/"
        setattr(req, _CHANGED, True)


def key_of_client(req: "Req") -> str | None:
    """The extra key that the request came with."""
    key: str | None = req.extra_key
    return key.removesuffix("/") if key and hasattr(req, _CHANGED) else key


def seed_of(req: "Req", namespace: Digest, adapter: str | None) -> KeySeed:
    """The seed of the request's keys.

    Args: adapter: digest of the content of its LoRA adapter, if it has one.
    """
    extra_key = req.extra_key
    if req.lora_id is not None:
        # SGLang appends an id made of the adapter's name and path, which does not identify its
        # weights, and behind it the number of ranks of elastic expert parallelism. The digest takes
        # the place of the id.
        before, _, behind = (extra_key or "").rpartition(req.lora_id)
        extra_key = before + behind or None
    return KeySeed(namespace, extra_key, req.cache_salt or None, adapter)
