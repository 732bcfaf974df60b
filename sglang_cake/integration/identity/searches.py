"""Digests of weights and adapters: files are hashed, in the background if that takes more than a
moment, and all ranks of a group learn the result in the same step."""

import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.identity import content, kv_facts
from sglang_cake.integration.identity.content import ContentChanged, Files, content_digest

logger = logging.getLogger("sglang_cake")

Facts = dict[str, str]
# Hashed at once, in a quarter of a second: small models and adapters are known when they are asked.
SHORT_BYTES = 256 << 20
PRIVATE = "private-"
WEIGHTS = "weights"  # the search for what the model holds


def private_name() -> str:
    """The name of content that cannot be identified: it is used once, by this process."""
    return f"{PRIVATE}{uuid.uuid4().hex}"


# ---- what lies on the disk ----


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where SGLang loads a model's weights from."""

    path: str  # a folder, a file, or a name on Hugging Face
    revision: str | None = None
    download_dir: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the files are there before the model is loaded."""
        return Path(self.path).exists()

    def folder(self) -> Path:
        """Raises: ConfigError if nothing is there, or it comes from elsewhere."""
        if not self.is_local and os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in (
            "1",
            "true",
        ):
            raise ConfigError(f"{self.path!r} comes from ModelScope")
        return content.model_folder(
            self.path, revision=self.revision, download_dir=self.download_dir
        )

    def weights(self) -> Files:
        """Raises: ConfigError, OSError."""
        return content.look(content.weight_files(self.path, self.folder()))

    def look(self) -> Files | None:
        """The weight files as they are now; None if there are none, or they cannot be seen."""
        try:
            return self.weights()
        except (ConfigError, OSError):
            return None


@dataclass(slots=True)
class _Loaded:
    """The files on disk when SGLang loaded them, before there is a tree. One model per process."""

    looked: bool = False
    weights: Files | None = None  # before the load; None: it was to bring them
    adapters: dict[str, Files | None] = field(default_factory=dict)  # by LoRA id; None: unknown
    on_adapter: Callable[[str], None] | None = None  # called with each LoRA id that is loaded


LOADED = _Loaded()


# ---- looking, in the background ----


@dataclass(slots=True)
class Search:
    """Facts about content, which are known later, or not at all."""

    name: str
    find: Callable[["Search"], Facts]  # raises ContentChanged, ConfigError, OSError, ValueError
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    facts: Facts | None = None  # None: not known, or cannot be known
    adapter: str | None = None  # the LoRA id of the adapter; None: the search is for the model
    tensors: frozenset[str] | None = None  # names of all tensors of a model, if they are known

    def run(self) -> None:
        try:
            self.facts = self.find(self)
        except (ContentChanged, ConfigError, OSError, ValueError) as error:
            if not self.stop.is_set():
                logger.warning("cake cannot tell what the %s hold: %s", self.name, error)
        except Exception:
            logger.exception("cake cannot tell what the %s hold", self.name)
        finally:
            self.done.set()


class Searches:
    """What this process looks for. All ranks of a group begin the same searches in the same order,
    and learn of their ends in the same step. The scheduler thread owns it.

    Args:
        reduce_min: in-place MIN over an int64 CPU tensor across the ranks; None for a single rank.
    """

    def __init__(self, reduce_min: Callable[[torch.Tensor], None] | None) -> None:
        self._reduce_min = reduce_min
        self._open: dict[str, Search] = {}
        self._queue: queue.SimpleQueue[Search] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def alone(self) -> bool:
        """Whether there is one rank."""
        return self._reduce_min is None

    def begin(self, search: Search, *, size_bytes: int) -> None:
        """Look, at once if there is little to read. It takes the place of a search of that name."""
        self.end(search.name)
        self._open[search.name] = search
        if size_bytes <= SHORT_BYTES:
            search.run()
            return
        if self._thread is None:  # a daemon: a hung disk must not keep the process from ending
            self._thread = threading.Thread(target=self._work, name="cake-identify", daemon=True)
            self._thread.start()
        self._queue.put(search)

    def wait(self) -> None:
        """Return when no search is under way here."""
        for search in self._open.values():
            search.done.wait()

    def end(self, name: str) -> None:
        """Nobody wants to know any more."""
        if (search := self._open.pop(name, None)) is not None:
            search.stop.set()

    def close(self) -> None:
        """End all searches; none is waited for."""
        for name in list(self._open):
            self.end(name)

    def ended(self) -> list[Search]:
        """Searches that ended on every rank, once each; facts are None if one rank has none.

        Every rank must call this at the same point of the same step.
        """
        if not self._open:
            return []
        searches = list(self._open.values())
        levels = [s.done.is_set() + (s.done.is_set() and s.facts is not None) for s in searches]
        if self._reduce_min is not None:
            tensor = torch.tensor(levels, dtype=torch.int64)
            self._reduce_min(tensor)
            levels = tensor.tolist()
        ended = []
        for search, level in zip(searches, levels, strict=True):
            if level:
                del self._open[search.name]
                search.facts = search.facts if level == 2 else None
                ended.append(search)
        return ended

    def _work(self) -> None:
        while True:
            self._queue.get().run()


def model_search(
    place: ModelPlace, values: Any, defaults: Mapping[str, object]
) -> tuple[Search, int]:
    """What the model holds that the server was started with, and how much there is to read.

    Args: values: server arguments, resolved. defaults: of all of them.
    """
    beside: list[Files] = []
    weights, configs = Files(), Files()
    private = kv_facts.private_reason(values, defaults)
    reason: str | None = None
    try:
        weights = place.weights()
        if not LOADED.looked or LOADED.weights not in (None, weights):
            private = private or "files changed while they were loaded"
        code = bool(values.trust_remote_code)
        configs = content.look(content.config_files(place.folder(), code=code))
        beside = [content.look(content.all_files(p)) for p in kv_facts.content_paths(values)]
    except (ConfigError, OSError) as error:
        reason = str(error)
    if private is not None:
        logger.warning("cake: the weights cannot be identified: %s", private)

    def find(search: Search) -> Facts:
        if reason is not None:
            raise ConfigError(reason)
        search.tensors = content.tensor_names(weights)
        facts = {"weights": private_name()}
        if private is None:
            facts = {"weights": content_digest(weights, search.stop)}
        facts["config"] = content_digest(configs, search.stop)
        if beside:
            facts["beside"] = " ".join(content_digest(each, search.stop) for each in beside)
        return facts

    hashed = [configs, *beside] if private is not None else [weights, configs, *beside]
    return Search(WEIGHTS, find), sum(map(content.unhashed_bytes, hashed))


def update_search(files: Files | None, complete: frozenset[str] | None) -> tuple[Search, int]:
    """The search for weights that were loaded into the running server.

    Args:
        files: as they were before and after the load; None: not known.
        complete: names of all tensors of the model; files without one of them leave it as it was,
            and so do not say what the model holds now.
    """

    def find(search: Search) -> Facts:
        if files is None:
            return {"weights": private_name()}
        names = content.tensor_names(files)
        if names is None or complete is None or not names >= complete:
            raise ContentChanged("the files do not hold all of the model's tensors")
        return {"weights": content_digest(files, search.stop)}

    return Search(WEIGHTS, find), 0 if files is None else content.unhashed_bytes(files)


def adapter_search(lora_id: str, files: Files | None, settings: str) -> tuple[Search, int]:
    """What an adapter holds, and with which settings it was loaded."""

    def find(search: Search) -> Facts:
        if files is None:
            return {"adapter": private_name()}
        return {"adapter": f"{content_digest(files, search.stop)} {settings}".strip()}

    search = Search(f"files of adapter {lora_id}", find, adapter=lora_id)
    return search, 0 if files is None else content.unhashed_bytes(files)
