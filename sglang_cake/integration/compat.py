"""The supported versions of SGLang, and every name of SGLang that this package uses.

`compat.toml` lists the names that are hooked, overridden, imported or read, with the parameters of
functions as they were in the checked versions. `require` compares them with the installed SGLang
before anything is loaded. It searches SGLang's sources, which takes 0.1 s, and imports
nothing of them, so that it sees no patch of another plugin.

Private names of SGLang are used in this module alone, each behind a function, except for functions
with a hook and for methods that a class of this package overrides.

    python -m sglang_cake.integration.compat      writes compat.toml anew for the installed version
"""

import ast
import functools
import importlib.util
import json
import logging
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from sglang.version import __version__

from sglang_cake.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.environ import EnvField
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger("sglang_cake")

CHECKED = SpecifierSet(">=0.5.22,<=0.5.23")
"""The versions that the tests ran with (docs/extending.md)."""
INSTALLED: str = __version__

NAMES_FILE = Path(__file__).with_name("compat.toml")
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_FIELDS = "sglang.srt.arg_groups.fields"  # SGLang assembles ServerArgs of the classes in here
ATTRIBUTE = ""  # stands for a name that is not a function
MISSING = "missing"

Names = dict[str, dict[str, str | list[str]]]
"""Class or module -> name -> parameters, or ATTRIBUTE, or MISSING; a list has what the checked
versions differ in."""


# ---- the check ----


def require(version: str = INSTALLED, names: Names | None = None) -> None:
    """Compare `names` (default: compat.toml) with the installed SGLang. Logs one warning for a
    version that was not checked and has all of them.

    Raises: ConfigError, one line with all differences.
    """
    found = differences(names, version)
    if found:
        raise ConfigError(
            f"cake was checked with SGLang {CHECKED}; the installed {version} differs in "
            f"{len(found)} places: {'; '.join(found)}. Install sglang{CHECKED}"
        )
    if version not in CHECKED:
        _warn_once(
            f"cake was checked with SGLang {CHECKED}, not with {version}; all names that it uses "
            "are there"
        )


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning(line)


def differences(names: Names | None = None, version: str = INSTALLED) -> list[str]:
    """The names (default: of compat.toml) that the installed SGLang lacks, or has with another
    signature. In a version that was not checked, a missing optional name is a difference too: it
    may have been renamed."""
    found = []
    for owner, expected in (read_names() if names is None else names).items():
        for name, parameters in expected.items():
            full = f"{owner.removeprefix('sglang.srt.')}.{name}"
            actual = signature(owner, name)
            forms = [parameters] if isinstance(parameters, str) else parameters
            if actual is None and (MISSING not in forms or version not in CHECKED):
                found.append(f"{full} is missing")
            elif actual is not None and actual not in forms:
                found.append(f"{full}{actual or ' (no function)'} instead of {' or '.join(forms)}")
    return found


def read_names() -> Names:
    """The names in compat.toml."""
    return tomllib.loads(NAMES_FILE.read_text(encoding="utf-8"))


def signature(owner: str, name: str) -> str | None:
    """The parameters of a function of SGLang; ATTRIBUTE for another name; None if it is missing.

    Args: owner: class or module, dotted, as `sglang.srt.managers.scheduler.Scheduler`.
    """
    head = _members(owner).get(name)
    return _parameters(head) if head else head


def module_source(name: str) -> str | None:
    """The text of a module of SGLang; None if there is no such module."""
    path = _path(name)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def _path(name: str) -> Path:
    package = importlib.util.find_spec("sglang")
    assert package is not None
    root = next(iter(package.submodule_search_locations or []))
    return Path(root, *name.split(".")[1:])


# The sources are searched by regular expressions, since parsing 45 modules takes 1.6 s. So a name
# counts as defined if a line looks like its definition. The expressions begin with a literal, which
# makes them fast: `\n` is the start of a line.
_NEXT_DEFINITION = re.compile(r"\n(?:@|class |def |async def )")
_READ_FROM_SELF = re.compile(r"self\.(\w+)\b(?! *\()")
_IMPORTED = re.compile(r"\n {0,4}(?:from \S+ )?import (\([^)]*\)|[^(\n]*)")


@functools.cache
def _members(owner: str) -> dict[str, str]:
    """Name -> parameters of a function as they are written, with parentheses, or ATTRIBUTE."""
    text = module_source(owner)
    if text is not None or _path(owner).is_dir():
        text = f"\n{text or ''}"
        submodules = [file.stem for file in _path(owner).glob("*.py")]
        imported = re.findall(r"\w+", " ".join(_IMPORTED.findall(text)))
        return dict.fromkeys([*submodules, *imported], ATTRIBUTE) | _defined(text, indent=0)
    module, _, name = owner.rpartition(".")
    text = module_source(module) if module.startswith("sglang.") else None
    head = re.search(rf"\nclass {name}\b([^:]*):", text or "")
    if text is None or head is None:
        return {}
    following = _NEXT_DEFINITION.search(text, head.end())
    body = text[head.end() : following.start() if following else len(text)]
    found = dict.fromkeys(_READ_FROM_SELF.findall(body), ATTRIBUTE)
    for base in re.findall(r"\w+", head[1]):
        place = re.search(rf"\nfrom (\S+) import (?:\([^)]*|[^(\n]*)\b{base}\b", text)
        found |= _members(f"{place[1] if place else module}.{base}")
    for file in _path(_FIELDS).glob("*.py") if owner == SERVER_ARGS else ():
        for part in re.findall(r"\nclass (\w+)", file.read_text(encoding="utf-8")):
            found |= _members(f"{_FIELDS}.{file.stem}.{part}")
    return found | _defined(body, indent=4)


def _defined(text: str, *, indent: int) -> dict[str, str]:
    """What statements at this indentation define, as `_members` has it."""
    margin = " " * indent
    found = dict.fromkeys(re.findall(rf"\n{margin}(?:class )?(\w+) *[:=(]", text), ATTRIBUTE)
    three_levels = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # of parentheses
    functions = re.finditer(
        rf"\n((?:{margin}@.*\n)*){margin}(?:async )?def (\w+)({three_levels})", text
    )
    for decorators, name, parameters in (function.groups() for function in functions):
        is_property = "property" in decorators or ".setter" in decorators
        found[name] = ATTRIBUTE if is_property else parameters
    return found


def _parameters(head: str) -> str:
    """As `(self, req, limit=, *, up_to, **kwargs)`: names, kinds, and which have a default."""
    (function,) = ast.parse(f"def function{head}: ...").body
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    without = len(plain) - len(args.defaults)
    words = [arg.arg + ("=" if at >= without else "") for at, arg in enumerate(plain)]
    if args.posonlyargs:
        words.insert(len(args.posonlyargs), "/")
    if args.vararg:
        words.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        words.append("*")
    named = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    words += [arg.arg + ("" if default is None else "=") for arg, default in named]
    if args.kwarg:
        words.append(f"**{args.kwarg.arg}")
    return f"({', '.join(words)})"


# ---- private names ----


def registered_hooks(function: str) -> list[Any]:
    """The hooks of a function in SGLang's registry, those of other plug-ins included."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [hook for _, hook, _ in HookRegistry._hooks.get(function, ())]


def apply_last_hook(function: str) -> None:
    """Have SGLang call the last registered hook of a function from now on. `apply_hooks` leaves it
    out if the function has hooks that are applied already."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if function in HookRegistry._patched:
        HookRegistry._apply_target(function, HookRegistry._hooks[function][-1:])
    else:
        HookRegistry.apply_hooks()


def reduce_min(tree: "UnifiedRadixCache", tensor: "torch.Tensor") -> None:
    """Set `tensor` to its minimum over the ranks that share a request's attention."""
    import torch

    tree._all_reduce_attn_groups(tensor, torch.distributed.ReduceOp.MIN)


def lock_node(adder: "PrefillAdder", node: Any) -> Any:
    """Context manager inside which the nodes from `node` to the root are not evicted."""
    return adder._lock_node(node)


def longest_prefix_tokens(req: "Req", tokens: int) -> int:
    """How many of a request's first `tokens` tokens may come from a cache."""
    return int(req._compute_max_prefix_len(tokens))


def has_split_cached_tokens(req: "Req") -> bool:
    """Whether SGLang has already split the request's cached tokens by device, host and storage."""
    return bool(req._cache_breakdown_computed)


def has_tracked_state(kv: Any, place: int) -> bool:
    """Whether a place in the ping-pong buffer of a request (its `kv`) holds a slot of the pool."""
    empty = getattr(
        kv, "mamba_ping_pong_empty", None
    )  # not in 0.5.22; it spares a copy to the host
    return bool(kv.mamba_ping_pong_track_buffer[place] != -1) if empty is None else not empty[place]


def state_chunk_tokens() -> int:
    """The tokens between two recurrent states that the forward of a step keeps, with SGLang's extra
    buffers: whole pages, and whole chunks of the kernels."""
    from sglang.srt.runtime_context import mamba_cache_chunk_size

    return int(mamba_cache_chunk_size())


def drops_states_beyond_answers() -> bool:
    """Whether SGLang keeps no state that is after the last token of an answer: a step that
    accepts drafts may go on beyond it."""
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )

    return hasattr(SchedulerBatchResultProcessor, "_mamba_can_cache_finished_req")  # not in 0.5.22


def take_deferred_requests(scheduler: "Scheduler") -> list[Any]:
    """Receive new requests into the scheduler's list of deferred requests, which it handles after
    the step. Returns that list, not a copy."""
    deferred: list[Any] = scheduler._deferred_input_requests
    deferred.extend(scheduler.request_receiver.recv_requests())
    return deferred


def request_source(scheduler: "Scheduler") -> Any:
    """Where this rank gets requests from; None: from another rank."""
    return scheduler.request_receiver.recv_from_tokenizer


def spare_metadata(buffers: "MetadataBuffers", place: int) -> "torch.Tensor":
    """int64 `[7]`: a part of what a prefill server sends with a prompt's KV, which SGLang leaves
    unused. Args: place: of the request in `buffers`."""
    import torch

    row: torch.Tensor = buffers.bootstrap_room[place]  # 8 numbers; the first is SGLang's
    return row.view(torch.int64)[1:]


def abort_chunked_request(scheduler: "Scheduler", req: "Req") -> None:
    """Abort `req` after the step under way, if it is the request that is prefilled in chunks."""
    if scheduler.chunked_req is req:
        scheduler._pending_chunked_abort_req = req


def other_plugins() -> dict[str, tuple[Any, str | None]]:
    """The plug-ins of SGLang that this process has loaded beside cake: by name, what SGLang has
    called, and the name of the distribution."""
    from sglang.srt.plugins import (
        GENERAL_PLUGINS_GROUP,
        _get_excluded_dists,
        load_plugins_by_group,
    )

    found = load_plugins_by_group(GENERAL_PLUGINS_GROUP, excluded_dists=_get_excluded_dists())
    own = __name__.partition(".")[0]
    return {name: each for name, each in found.items() if module_of(each[0]).split(".")[0] != own}


def module_of(made: Any) -> str:
    """The module of a class or a function. An entry point may also be a module."""
    return str(getattr(made, "__module__", None) or getattr(made, "__name__", ""))


def weights_are_being_pushed(updater: Any) -> bool:
    """Whether a session of `begin_weight_update` is open. Args: updater: of the scheduler."""
    return updater._session is not None


def default_value(variable: "EnvField") -> object:
    """What SGLang takes for an environment variable that is not set."""
    return variable._resolve_default()


def tokenizer_manager() -> Any:
    """The tokenizer manager of the process that serves HTTP."""
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


def answer_without_admin_key() -> Any:
    """SGLang's response if the server has no admin key."""
    from sglang.srt.entrypoints import http_server

    return http_server._admin_api_key_missing_response()


def _written(names: Names) -> str:
    lines = ["# Names of SGLang that this package uses; written by compat.py."]
    for owner in sorted(names):
        lines += ["", f'["{owner}"]']
        for name, forms in sorted(names[owner].items()):
            found = signature(owner, name)
            text = MISSING if found is None else found
            # Forms of other versions stay until they are deleted by hand.
            several = isinstance(forms, list) and sorted({*forms, text})
            lines.append(f"{name} = {json.dumps(several or text)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    NAMES_FILE.write_text(_written(read_names()), encoding="utf-8")
