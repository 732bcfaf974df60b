"""Requests to running servers, access to the files of their stores, and waiting for conditions."""

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from namespace_folder import NamespaceFolder
from polling import until

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame, payload_checksum
from sglang_cake.core.keys import BlockKey, Digest, KeySeed, Namespace, block_keys, end_keys
from sglang_cake.core.layout import BlockLayout
from sglang_cake.demo.sglang_server import SglangServer
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import BlockFolder

BLOCK = 64
CHUNK = 256
VOCAB = 32000  # as SGLang's own test kits expect
NEW_TOKENS = 6
DEADLINE_S = 120.0
DRAFT_CHAIN = (  # three tokens are proposed in a step
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
# Stages of a request: an event of its trace, and how often it has happened.
STAGES = (
    ("arrive", 1),
    ("found", 1),
    ("fetch", 1),
    ("claim", 1),
    ("fetch", 6),
    ("claim", 2),
    ("attach", 1),
    ("done", 1),
)
MOST_END_BLOCKS = 16  # of the models here
# With other chunk borders, results are rounded differently, by about 1e-5 in float32. The controls,
# with wrong KV, require a difference of twenty times the tolerance.
TOLERANCE = 5e-4
_ALARMS = re.compile(
    r"leak detected|exception in the scheduler|Scheduler hit an exception|SIGQUIT received"
    r"|broke its contract|a lookup failed|could not be copied|AssertionError|KeyError",
    re.IGNORECASE,
)


# The `start` fixture: (model, flags, *, store, bandwidth, env) runs a server.
Start = Callable[..., "AbstractContextManager[Live]"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a request."""

    tokens: list[int]
    logprobs: list[float]
    input_logprobs: list[float | None]
    cached: int
    meta: dict[str, Any]

    @classmethod
    def of(cls, body: dict[str, Any]) -> "Answer":
        assert "meta_info" in body, body
        meta = body["meta_info"]
        details = meta.get("cached_tokens_details")
        if details is not None:
            total = sum(details.get(tier, 0) for tier in ("device", "host", "storage"))
            assert total == meta["cached_tokens"], meta
        return cls(
            tokens=body["output_ids"],
            logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or ()],
            input_logprobs=[entry[0] for entry in meta.get("input_token_logprobs") or ()],
            cached=meta.get("cached_tokens", 0),
            meta=meta,
        )

    @property
    def loaded(self) -> int:
        return int(self.meta["cake"]["loaded_tokens"])

    @property
    def computed(self) -> int:
        return int(self.meta["cake"]["computed_tokens"])


def distance(one: Sequence[float | None], other: Sequence[float | None]) -> float:
    assert len(one) == len(other)
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def assert_same(answer: Answer, reference: Answer, tolerance: float = TOLERANCE) -> None:
    assert answer.tokens == reference.tokens
    assert distance(answer.logprobs, reference.logprobs) <= tolerance
    assert distance(answer.input_logprobs, reference.input_logprobs) <= tolerance


@dataclass(slots=True)
class StoreView:
    """The files of a store, for tests that read or damage them."""

    root: Path
    ranks: int = 1  # that store; each has a namespace, described when its first block is stored
    next_tokens: int = 0  # behind a block, that its key covers

    def namespaces(self) -> list[NamespaceFolder]:
        found = sorted(self.root.glob("*/namespace.json"))
        return [NamespaceFolder(self.root, Digest(bytes.fromhex(f.parent.name))) for f in found]

    def files(self, tokens: Sequence[int], **seed: str) -> list[Path]:
        """The paths of the full blocks of `tokens` in all namespaces, in order, stored or not."""
        return [
            namespace.block(key)
            for namespace in self.namespaces()
            for key in block_keys(
                KeySeed(_seeding(namespace), **seed), tokens, BLOCK, next_tokens=self.next_tokens
            )
        ]

    def end_files(self, tokens: Sequence[int]) -> list[Path]:
        """Those of the end state behind the full blocks of `tokens` in all namespaces, if it is
        stored."""
        found: list[Path] = []
        for namespace in self.namespaces():
            seed = KeySeed(namespace.digest)
            last = block_keys(seed, tokens, BLOCK, next_tokens=self.next_tokens)[-1]
            ranks = int(json.loads(namespace.description.read_text()).get("end_ranks", 1))
            for rank in range(ranks):
                keys = end_keys(last, MOST_END_BLOCKS, rank, ranks)
                files = [namespace.block(key) for key in keys]
                if not files[0].exists():
                    return []
                found += [file for file in files if file.exists()]
        return found

    def until_end_stored(self, tokens: Sequence[int]) -> list[Path]:
        """Wait until the end state behind the full blocks of `tokens` is stored. Its first block is
        stored last."""
        with contextlib.closing(BlockFolder(FolderSettings(self.root))) as folder:
            until(
                lambda: (
                    (files := self.namespaces() and self.end_files(tokens))
                    and all(_is_indexed(folder, file) for file in files)
                ),
                f"an end at token {len(tokens) // BLOCK * BLOCK} in the store",
            )
        return self.end_files(tokens)

    def until_stored(self, tokens: Sequence[int], **seed: str) -> list[Path]:
        if not tokens:
            return []
        with contextlib.closing(BlockFolder(FolderSettings(self.root))) as folder:
            until(
                lambda: (
                    len(self.namespaces()) >= self.ranks
                    and all(_is_indexed(folder, file) for file in self.files(tokens, **seed))
                ),
                f"{len(tokens)} tokens in the store",
            )
        return self.files(tokens, **seed)

    def remove(self, *files: Path) -> None:
        """Remove blocks, as another process that shares the store may."""
        with contextlib.closing(BlockFolder(FolderSettings(self.root))) as folder:
            for file in files:
                folder.delete(*_names(file))

    def blocks(self) -> list[Path]:
        return [f for f in self.root.glob("*/*/*/*") if len(f.name) == 64]

    def set_aside(self, file: Path) -> bool:
        return any((each.corrupt / file.name).exists() for each in self.namespaces())


def _seeding(folder: NamespaceFolder) -> Digest:
    """The digest that seeds the keys of a namespace: with head groups, that of all groups."""
    described = json.loads(folder.description.read_text())
    if described.pop("head_group", None) is None:
        return folder.digest
    return Namespace(tuple(described.items())).digest()


def _names(file: Path) -> tuple[Digest, BlockKey]:
    return Digest(bytes.fromhex(file.parents[2].name)), BlockKey(bytes.fromhex(file.name))


def _is_indexed(folder: BlockFolder, file: Path) -> bool:
    digest, key = _names(file)
    if folder.stats().blocks is None:  # the index is not open yet, on a busy disk
        return False
    return folder.contains(digest, [key], 0, threading.Event()) == [True]


def layout_of(file: Path) -> BlockLayout:
    return BlockLayout.parse(description_of(file)["layout"])


def layout_from(described: dict[str, Any]) -> BlockLayout:
    """Args: described: what `BlockLayout.describe` wrote."""
    parts = tuple((name, tuple(shape)) for name, shape in described["parts"])
    return BlockLayout.plain(
        described["layers"], parts, described["dtype"], described["block_tokens"]
    )


def description_of(file: Path) -> dict[str, str]:
    """The facts of the namespace that a block belongs to."""
    return dict(json.loads((file.parents[2] / "namespace.json").read_text()))


def _frame_of(file: Path) -> BlockFrame:
    """How a block of a plain codec is framed, by the facts of its namespace."""
    return BlockFrame(Namespace(tuple(description_of(file).items())), layout_of(file))


def check_block(file: Path) -> None:
    """Raises: BlockCorrupt, or AssertionError, if the file is not a whole block."""
    raw = file.read_bytes()
    digest, key = _names(file)
    frame = _frame_of(file)
    assert frame.digest == digest, file
    header = frame.check(raw[:HEADER_BYTES], key)
    assert payload_checksum(raw[HEADER_BYTES:]) == header.payload_checksum, file


def falsify(file: Path) -> None:
    """Replace a block file by a valid one with wrong KV: tokens and planes are permuted."""
    layout = layout_of(file)
    payload = np.frombuffer(file.read_bytes()[HEADER_BYTES:], np.uint8)
    planes = [
        payload[plane.start : plane.start + plane.rows * plane.row_bytes]
        .reshape(plane.rows, plane.row_bytes)[::-1]
        .ravel()
        for plane in layout.planes
    ]
    forge(file, np.concatenate(planes[1:] + planes[:1]).tobytes())


def check_wrong_kv_is_noticed(
    files: Sequence[Path], ask: Callable[[], Answer], truth: Answer, tolerance: float = TOLERANCE
) -> None:
    """The control: where these files have wrong KV, the answer is not that of `truth`."""
    for file in files:
        falsify(file)
    lie = ask()
    assert lie.loaded > 0
    with pytest.raises(AssertionError):
        assert_same(lie, truth, tolerance)


def falsify_draft(file: Path) -> None:
    """Replace a block by a valid one that lacks the KV of the draft model."""
    layout = layout_of(file)
    drafts = [
        plane
        for plane, name in zip(
            layout.planes,
            [n for g in layout.groups for n, _ in g.parts * g.layers],
            strict=True,
        )
        if name.startswith("draft_")
    ]
    assert drafts
    payload = np.frombuffer(file.read_bytes()[HEADER_BYTES:], np.uint8).copy()
    for plane in drafts:
        stop = plane.start + plane.rows * plane.row_bytes
        payload[plane.start : stop] = 0
    forge(file, payload.tobytes())


def forge(file: Path, payload: bytes) -> None:
    """Make a file a valid block with this payload."""
    _, key = _names(file)
    file.write_bytes(_frame_of(file).header(key, payload) + payload)


ADMIN_KEY = "for-admins"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@dataclass(slots=True)
class Live:
    """A running server, its store and its trace.

    Attributes:
        references: answers of `reference`.
        races: whether loading and computing race, so that no block is certain to be loaded.
        headers: of every request.
        killed: a test has killed the server, so its log may have errors.
    """

    server: SglangServer
    store: StoreView | None = None
    trace: Path | None = None
    references: dict[str, Answer] = field(default_factory=dict)
    races: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    killed: bool = False

    @property
    def url(self) -> str:
        return self.server.base_url

    def post(self, path: str, timeout_s: float = DEADLINE_S, **body: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, headers=self.headers, timeout=timeout_s)

    def ask(self, ids: Sequence[int], new_tokens: int = NEW_TOKENS, **extra: Any) -> Answer:
        """The answer to a greedy request, with the logprobs of the generated tokens."""
        reply = self.post("/generate", **request(ids, new_tokens, **extra))
        assert reply.status_code == 200, reply.text[:500]
        return Answer.of(reply.json())

    def reference(self, ids: Sequence[int], new_tokens: int = NEW_TOKENS, **extra: Any) -> Answer:
        """`ask`, with a cache of the answers: for servers whose answers are references."""
        name = json.dumps([list(ids), new_tokens, extra], sort_keys=True)
        if name not in self.references:
            self.references[name] = self.ask(ids, new_tokens, **extra)
        return self.references[name]

    def flush(self) -> None:
        """Wait until all requests have ended, and empty the tree."""
        reply = self.post(f"/flush_cache?timeout={DEADLINE_S}")
        assert reply.status_code == 200, reply.text

    def ask_flushed(self, ids: Sequence[int], new_tokens: int = NEW_TOKENS, **extra: Any) -> Answer:
        """`ask` with an empty tree: KV that is not computed comes from the store."""
        self.flush()
        return self.ask(ids, new_tokens, **extra)

    def ask_and_store(self, ids: Sequence[int], **extra: Any) -> list[Path]:
        """Ask for a prompt, and wait until its blocks are stored. Returns their files."""
        assert self.store is not None
        seed = {"cache_salt": extra["cache_salt"]} if "cache_salt" in extra else {}
        self.ask(ids, 1, **extra)
        return self.store.until_stored(ids, **seed)

    def ask_store(self, verb: str, **body: Any) -> requests.Response:
        """A request to `/cake/store`."""
        url = self.url + "/cake/store"
        return requests.request(
            verb, url, headers=self.headers, json=body or None, timeout=DEADLINE_S
        )

    def update_weights(self, model: Path, **more: Any) -> None:
        """Take the weights of another model."""
        reply = self.post("/update_weights_from_disk", model_path=str(model), **more)
        assert reply.json()["success"], reply.text

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `sglang:cake_<name>` that carry `labels`."""
        total = 0.0
        for line in requests.get(self.url + "/metrics", timeout=DEADLINE_S).text.splitlines():
            if line.startswith(f"sglang:cake_{name}{{") and all(
                f'{label}="{value}"' in line for label, value in labels.items()
            ):
                total += float(line.rpartition(" ")[2])
        return total

    def events(self, rid: str) -> list[dict[str, Any]]:
        assert self.trace is not None
        text = self.trace.read_text() if self.trace.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [json.loads(line) for line in lines if f'"{rid}"' in line]

    def check_log(self) -> None:
        found = [line for line in self.server.logs().splitlines() if _ALARMS.search(line)]
        assert not found, "\n".join(line[:400] for line in found[:5])


def request(ids: Sequence[int], new_tokens: int = NEW_TOKENS, **extra: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {
        "input_ids": list(ids),
        "return_logprob": True,
        "sampling_params": sampling | extra.pop("sampling", {}),
        **extra,
    }


class PendingRequest:
    """A request in a thread of its own."""

    def __init__(self, live: Live, ids: Sequence[int], **extra: Any) -> None:
        self.rid = str(extra.get("rid"))
        self._live = live
        self._result: Answer | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(ids, extra), daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end of the request, with or without an answer."""
        self._thread.join(DEADLINE_S)
        assert not self.is_running

    def answer(self) -> Answer:
        self._thread.join(DEADLINE_S)
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None, "no answer"
        return self._result

    def until(self, event: str, count: int = 1) -> None:
        """Wait for `count` such events of this request in the trace, or for the request to end."""

        def seen() -> bool:
            events = self._live.events(self.rid)
            return sum(e["event"] == event for e in events) >= count or not self._thread.is_alive()

        until(seen, f"{count} x {event}")

    def _run(self, ids: Sequence[int], extra: dict[str, Any]) -> None:
        try:
            self._result = self._live.ask(ids, **extra)
        except Exception as error:
            self._result = error


_ABORTED = itertools.count()


def abort_at_every_stage(live: Live, ids: Sequence[int], **extra: Any) -> None:
    """Ask for a stored prompt and abort it, with an empty tree each time."""
    for event, count in STAGES:
        live.flush()
        rid = f"abort-{next(_ABORTED)}"
        asking = PendingRequest(live, ids, new_tokens=32, rid=rid, **extra)
        asking.until(event, count)
        live.post("/abort_request", rid=rid)
        assert asking.answer().meta["finish_reason"]["type"] in ("abort", "length")


def accepted(answer: Answer) -> list[int]:
    """How often 0, 1, 2, ... drafts were accepted in a step."""
    return list(answer.meta["spec_correct_drafts_histogram"])
