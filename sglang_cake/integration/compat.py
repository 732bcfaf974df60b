"""Which SGLang this package works with: its version, and every name of it that is used here.

`compat.toml` has every name that is hooked, overridden, imported or read, with the parameters of
functions as they were in the checked versions. `require` compares them with the installed SGLang
before anything is loaded. It parses SGLang's sources (1.6 s for 45 modules on two CPU cores) and
imports nothing of them, so that it sees no patch of another plugin.

Private names of SGLang are used in this module alone, each behind a function, but for methods that
a class of this package overrides.

    python -m sglang_cake.integration.compat      writes compat.toml anew for the installed version
"""

import ast
import functools
import importlib.util
import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from sglang.version import __version__ as sglang_version

from sglang_cake.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger("sglang_cake")

CHECKED = SpecifierSet("==0.5.23")
"""The versions that the whole test suite ran with."""

NAMES_FILE = Path(__file__).with_name("compat.toml")
ATTRIBUTE = ""  # stands for a name that is no function


# ---- the check ----


def require(version: str = sglang_version) -> None:
    """Refuse an SGLang that lacks a name or has other parameters; one line of warning for a version
    that was not checked and has them all.

    Raises: ConfigError, one line with all differences.
    """
    found = differences()
    _module.cache_clear()  # the trees of 45 modules
    if found:
        raise ConfigError(
            f"cake was checked with SGLang {CHECKED}; the installed {version} differs in "
            f"{len(found)} places: {'; '.join(found)}. Install sglang{CHECKED}"
        )
    if version not in CHECKED:
        logger.warning(
            "cake was checked with SGLang %s, not with %s; all names that it uses are there",
            CHECKED,
            version,
        )


def differences(names: dict[str, dict[str, str]] | None = None) -> list[str]:
    """What of `names` (default: compat.toml) the installed SGLang lacks or has otherwise."""
    found_differences = []
    for owner, expected in (read_names() if names is None else names).items():
        found = dict(members(owner))
        for name, parameters in expected.items():
            full = f"{owner.removeprefix('sglang.srt.')}.{name}"
            if name not in found:
                found_differences.append(f"{full} is missing")
            elif found[name] != parameters:
                found_differences.append(
                    f"{full}{found[name] or ' (no function)'} instead of {parameters}"
                )
    return found_differences


def read_names() -> dict[str, dict[str, str]]:
    """Class or module -> name -> parameters, or ATTRIBUTE."""
    return tomllib.loads(NAMES_FILE.read_text(encoding="utf-8"))


def members(owner: str) -> Iterator[tuple[str, str]]:
    """What a class (its bases included) or a module of SGLang has: name and parameters.

    Args: owner: dotted, as `sglang.srt.managers.scheduler.Scheduler`.
    """
    yield from ((path.stem, ATTRIBUTE) for path in _place(owner).glob("*.py"))
    module = _module(owner)
    if module is not None:
        yield from _module_members(module)
        return
    outer, _, name = owner.rpartition(".")
    found = _class(outer, name)
    if found is not None:
        yield from _class_members(outer, found)


@functools.cache
def _module(name: str) -> ast.Module | None:
    path = _place(name)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_bytes())
    return None


def _place(name: str) -> Path:
    """Where a package lies; with `.py`, a module."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    root = next(iter(package.submodule_search_locations or []))
    return Path(root, *name.split(".")[1:])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, also below `if` and `try`."""
    for each in body:
        yield each
        if isinstance(each, ast.If | ast.Try):
            yield from _statements(each.body)
            yield from _statements(each.orelse)
            for handler in getattr(each, "handlers", ()):
                yield from _statements(handler.body)


def _module_members(module: ast.Module) -> Iterator[tuple[str, str]]:
    for each in _statements(module.body):
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, ATTRIBUTE) for alias in each.names)
        else:
            yield from _defined(each)


def _class_members(module: str, found: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for base in found.bases:
        if isinstance(base, ast.Name):
            place, name = _imported(module, base.id)
            above = _class(place, name)
            if above is not None:
                yield from _class_members(place, above)
    for node in ast.walk(found):  # `self.name = ...` in a method
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, ATTRIBUTE
    for each in _statements(found.body):
        yield from _defined(each)


def _defined(each: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
        is_value = any("property" in ast.unparse(mark) for mark in each.decorator_list)
        yield each.name, ATTRIBUTE if is_value else _parameters(each.args)
    elif isinstance(each, ast.ClassDef):
        yield each.name, ATTRIBUTE
    elif isinstance(each, ast.Assign | ast.AnnAssign):
        targets = each.targets if isinstance(each, ast.Assign) else [each.target]
        yield from ((target.id, ATTRIBUTE) for target in targets if isinstance(target, ast.Name))


def _class(module: str, name: str) -> ast.ClassDef | None:
    tree = _module(module)
    classes = () if tree is None else _statements(tree.body)
    found = (each for each in classes if isinstance(each, ast.ClassDef) and each.name == name)
    return next(found, None)


def _imported(module: str, name: str) -> tuple[str, str]:
    """Where a name that stands in a module comes from."""
    tree = _module(module)
    for each in () if tree is None else _statements(tree.body):
        if isinstance(each, ast.ImportFrom) and each.module:
            for alias in each.names:
                if (alias.asname or alias.name) == name:
                    return each.module, alias.name
    return module, name


def _parameters(args: ast.arguments) -> str:
    """As `(self, req, limit=, *, up_to, **kwargs)`: names, kinds, and which have a default."""
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


def is_hooked(target: str) -> bool:
    """Whether SGLang's registry has replaced a function already."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return target in HookRegistry._patched


def reduce_in_attention_group(
    tree: "UnifiedRadixCache", tensor: "torch.Tensor", operation: Any
) -> None:
    """All-reduce `tensor` (in place) over the ranks that share a request's attention."""
    tree._all_reduce_attn_groups(tensor, operation)


def lock_node(adder: "PrefillAdder", node: Any) -> Any:
    """A context manager: the nodes from `node` to the root are not evicted inside."""
    return adder._lock_node(node)


def longest_prefix_tokens(req: "Req", tokens: int) -> int:
    """How many of a request's first `tokens` tokens may come from a cache."""
    return int(req._compute_max_prefix_len(tokens))


def has_split_cached_tokens(req: "Req") -> bool:
    """Whether SGLang has already split the request's cached tokens by where they were."""
    return bool(req._cache_breakdown_computed)


def take_deferred_requests(scheduler: "Scheduler") -> list[Any]:
    """Receive what has come from outside, and keep it where the scheduler keeps what it defers: it
    deals with it after the step. The list is the scheduler's own."""
    deferred: list[Any] = scheduler._deferred_input_requests
    deferred.extend(scheduler.request_receiver.recv_requests())
    return deferred


def abort_chunked_request(scheduler: "Scheduler", req: "Req") -> None:
    """If `req` is the request that is prefilled in chunks, it ends after the step under way."""
    if scheduler.chunked_req is req:
        scheduler._pending_chunked_abort_req = req


def tokenizer_manager() -> Any:
    """Of the process that serves HTTP."""
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


def answer_without_admin_key() -> Any:
    """What SGLang answers where a server has no admin key."""
    from sglang.srt.entrypoints import http_server

    return http_server._admin_api_key_missing_response()


def _written(names: dict[str, dict[str, str]]) -> str:
    lines = ["# Names of SGLang that this package uses; written by compat.py."]
    for owner in sorted(names):
        found = dict(members(owner))
        lines += ["", f'["{owner}"]']
        lines += [f'{name} = "{found.get(name, "missing")}"' for name in sorted(names[owner])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    NAMES_FILE.write_text(_written(read_names()), encoding="utf-8")
