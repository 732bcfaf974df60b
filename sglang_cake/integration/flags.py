"""Cake's settings on the command line and in `sglang.Engine`. A wrong one is reported in one line.

A setting is checked twice, both times in the launching process and before anything is loaded:

- when it is given, in `from_cli_args` or in the keywords of `Engine`;
- in `resolve_once`, together with SGLang's resolved settings and the model's configuration.

Every scheduler gets the settings with SGLang's ServerArgs. The variable ENABLED_ENV tells the
processes of a server with cake to load all hooks: children inherit it, and schedulers that Ray
starts set it. A process may build several engines, one after the other, so the variable is removed
before one without cake is configured.
"""

import argparse
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from sglang_cake.config import (
    CHILD_OF_CAKE,
    ENABLED_ENV,
    NAMES,
    CakeConfig,
    Spell,
    as_flag,
    resolve,
)
from sglang_cake.core.codec_names import check_installed
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration import admin_api, compat, response_stats
from sglang_cake.integration.support_matrix import (
    ModelTraits,
    unsupported,
    unsupported_when_resolved,
)
from sglang_cake.stores.open_store import check_sources, parse_sources

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger("sglang_cake")
BACKEND = "cake"

_RAY_ENGINE = "sglang.srt.ray.engine"
_SETTINGS_FILE = "config"  # `--cake-config` names a file with settings
_OURS = re.compile(r"--(?:cake|enable-cake)\b")


def add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    """AFTER `ServerArgs.add_cli_args`: adds cake's flags. argparse does not check their values."""
    group = parser.add_argument_group(
        "sglang_cake", "KV cache that reaches to disk: computes and loads a long prompt at once."
    )
    group.add_argument(
        "--enable-cake", action=_Enable, help="The same as --radix-cache-backend cake."
    )
    for setting in fields(CakeConfig):
        default = "" if setting.default is None else f" Default: {setting.default}."
        group.add_argument(
            as_flag(setting.name),
            metavar=setting.metadata["value"],
            help=setting.metadata["text"] + default,
        )
    group.add_argument(
        as_flag(_SETTINGS_FILE),
        metavar="FILE",
        help="TOML, JSON or YAML file with the same settings; flags and environment win over it.",
    )
    _shorten_errors(parser)


class _Enable(argparse._StoreTrueAction):  # SGLang's `--config` file may have no other switches
    """`--enable-cake`. Checks SGLang's names already here. If SGLang had renamed `from_cli_args`,
    cake's hook of it would never run, and the flag would have no effect."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object
    ) -> None:
        try:
            compat.require()
        except ConfigError as error:
            _exit(error)
        setattr(namespace, self.dest, True)


def from_cli_args(original: Any, cls: type, args: argparse.Namespace) -> Any:
    """AROUND `ServerArgs.from_cli_args`: checks cake's flags. Exits with 2 if one is wrong."""
    record = original(cls, args)
    enable = bool(getattr(args, "enable_cake", False))
    try:
        return _configure(record, enable, given_flags(args), on_cli=True)
    except ConfigError as error:
        _exit(error)


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Plain name -> text, of cake's flags on a command line."""
    return {
        name: value
        for name in (*NAMES, _SETTINGS_FILE)
        if (value := getattr(args, f"cake_{name}", None)) is not None
    }


def engine_args(server_args_class: Any, **kwargs: Any) -> Any:
    """`ServerArgs(**kwargs)` for an `Engine`. Cake's own keywords are taken out and checked.

    Raises: ConfigError.
    """
    given = {
        name.removeprefix("cake_"): kwargs.pop(name)
        for name in list(kwargs)
        if name.startswith("cake_")
    }
    enable = kwargs.pop("enable_cake", False)
    if type(enable) is not bool:
        raise ConfigError(f"enable_cake: {enable!r} is not possible, allowed: True, False")
    return _configure(server_args_class(**kwargs), enable, given, on_cli=False)


def resolve_once(original: Any, record: "ServerArgs") -> None:
    """AROUND `ServerArgs.resolve_once`, which every launcher calls before it starts children.

    Raises: ConfigError. If the settings came from the command line, it exits with 2 instead.
    """
    try:
        if _wants_cake(record) and _config_of(record) is None:
            _configure(record, False, {}, on_cli=False)  # a ServerArgs built by the user's code
        try:
            original(record)
        except (ValueError, AssertionError, NotImplementedError):
            # SGLang refuses some models with any foreign backend; our reason is more precise.
            if (config := _config_of(record)) is not None:
                _refuse(reason_despite_failure(record, config))
            raise
        config = _config_of(record)
        if config is not None and not getattr(record, "_cake_checked", False):
            _refuse(reason_when_resolved(record, config))
            if record.use_ray or _RAY_ENGINE in sys.modules:  # RayEngine does not need the flag
                _install_actors()
            _set(record, "_cake_checked", True)
    except ConfigError as error:
        _disable_children()
        if getattr(record, "_cake_on_cli", False):
            _exit(error)
        raise
    if config is None:
        _disable_children()
    else:
        _enable_children()
        response_stats.install_meta_info()
        admin_api.install(config)


def is_enabled_child() -> bool:
    """Whether this process is the child of a launcher that enabled cake."""
    return os.environ.get(ENABLED_ENV) == CHILD_OF_CAKE


def enable_in_ray_worker(record: "ServerArgs") -> bool:
    """Set the variable that a child of the launcher would have inherited. Returns whether the
    server has cake."""
    if _config_of(record) is None:
        return False
    _enable_children()
    return True


def settings_of(record: "ServerArgs") -> CakeConfig:
    """The settings of a scheduler, checked by its launcher.

    Raises: ConfigError if nothing has checked any.
    """
    config = _config_of(record)
    if config is None:
        raise ConfigError(
            "the ServerArgs of this scheduler hold no settings of cake: call their resolve_once, "
            "as SGLang's launchers do"
        )
    return config


def _install_actors() -> None:
    """Raises: ConfigError if Ray cannot be imported."""
    try:
        from sglang_cake.integration import ray_actors
    except ImportError as error:
        raise ConfigError(f"--use-ray needs Ray ({error}): pip install 'sglang[ray]'") from None
    ray_actors.install()


def _configure(record: "ServerArgs", enable: bool, given: dict[str, Any], *, on_cli: bool) -> Any:
    """Check cake's settings for this ServerArgs, and store them in it."""
    spell = as_flag if on_cli else "cake_{}".format
    switch = "--enable-cake" if on_cli else "enable_cake=True"
    if not enable and not _wants_cake(record):
        _disable_children()
        if given:
            raise ConfigError(f"{spell(next(iter(given)))} has no effect without {switch}: add it")
        return record
    compat.require()
    config = read_settings(given, spell)
    _refuse(reason_as_given(record, config, switch))
    _refuse(next(machine_faults(config), None))
    check_sources(parse_sources(config.store, config.eviction_policy))
    if not _wants_cake(record):  # a sealed record refuses to be written, even with an equal value
        record.radix_cache_backend = BACKEND
    if config.runahead_peers is not None and record.cuda_graph_backend_prefill is None:
        record.cuda_graph_backend_prefill = "disabled"  # a shared forward may end between layers
    _set(record, "_cake_config", config)
    _set(record, "_cake_on_cli", on_cli)
    _enable_children()
    return record


def read_settings(given: dict[str, Any], spell: Spell = as_flag) -> CakeConfig:
    """Cake's settings: `given`, and what the environment and a settings file say beside it.

    Raises: ConfigError.
    """
    named = dict(given)
    file = named.pop(_SETTINGS_FILE, None)
    # From Engine, the file may be a Path.
    file = None if file is None else str(file)
    return resolve(named, os.environ, file=file, spell=spell)


def reason_as_given(
    record: "ServerArgs", config: CakeConfig, switch: str = "--enable-cake"
) -> str | None:
    """Why cake does not support the settings of a server, as far as the unresolved ones show it.

    Args: switch: what enables cake, as it was spelled.
    """
    if record.radix_cache_backend not in (None, BACKEND):
        return (
            f"{switch} and another radix cache backend, {record.radix_cache_backend!r}, exclude "
            "each other: remove one of them"
        )
    return unsupported(record, None, config.block_tokens)


def chunk_tokens(args: "ServerArgs") -> int:
    """The most that a prompt with stored blocks computes in one step; without chunks, as many as
    SGLang computes for the prompts of one batch.

    Args: args: SGLang's ServerArgs, resolved.
    """
    chunk: int | None = args.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else int(args.max_prefill_tokens)


def _wants_cake(record: "ServerArgs") -> bool:
    return bool(record.radix_cache_backend == BACKEND)


def _config_of(record: "ServerArgs") -> CakeConfig | None:
    config = getattr(record, "_cake_config", None)
    return config if isinstance(config, CakeConfig) else None


def reason_when_resolved(record: "ServerArgs", config: CakeConfig) -> str | None:
    """Why cake does not support a server, by its resolved settings and its model.

    Raises: what SGLang raises for a configuration that it cannot read.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    if (reason := unsupported(record, None, config.block_tokens)) is not None:
        return reason  # as the user gave it; below, SGLang may have turned it off
    view = resolving_view(record)
    traits = ModelTraits()
    if view.model_path.lower() not in ("none", "dummy"):  # SGLang's spellings of "no model"
        traits = ModelTraits.of(model_config_of(record))
    return unsupported_when_resolved(view, traits, config)


def reason_despite_failure(record: "ServerArgs", config: CakeConfig) -> str | None:
    """The same after SGLang failed to resolve the settings; None if that cannot be told."""
    try:
        return reason_when_resolved(record, config)
    except Exception:  # the settings are resolved in part only; SGLang's error is shown
        return None


def _set(record: "ServerArgs", name: str, value: object) -> None:
    # An attribute of the record is copied with it, and each engine of a process has its own.
    # SGLang stores private attributes the same way: the seal guards the fields only.
    msgspec.Struct.__setattr__(record, name, value)


def machine_faults(config: CakeConfig) -> Iterator[str]:
    """Why the settings cannot be used on this machine: the package of the codec is missing, or a
    file that they name is not possible. Stores are not checked."""
    checks: list[Callable[[], object]] = [partial(check_installed, config.codec)]
    if config.has_group_setting:
        from sglang_cake.runahead.group_setting import group_setting

        checks.append(partial(group_setting, config))
    files = (config.trace_file, config.record_trace)
    checks += [partial(_check_trace_file, file) for file in files if file is not None]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _check_trace_file(file: str) -> None:
    folder = os.path.dirname(file) or os.curdir
    # `isdir` returns False where a folder above may not be entered.
    if os.path.isdir(file) or not os.path.isdir(folder):
        raise ConfigError(f"trace file {file!r} cannot be written: no such folder, or a folder")
    # Asks the folder of a file that is not there yet, so that no empty file is left behind.
    if not os.access(file if os.path.exists(file) else folder, os.W_OK):
        raise ConfigError(f"trace file {file!r} cannot be written by this user, or is read-only")


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(reason)


def _shorten_errors(parser: argparse.ArgumentParser) -> None:
    """Report errors in cake's flags without the hundreds of lines of usage that argparse prints."""
    original = parser.error
    flags = ["--enable-cake", *map(as_flag, (*NAMES, _SETTINGS_FILE))]

    def error(message: str) -> NoReturn:
        if _OURS.search(message):
            unknown = re.search(r"unrecognized arguments:.*?(--(?:enable-)?cake[^\s=]*)", message)
            near: list[str] = []
            if unknown:  # the cutoff is high since all our flags share their first letters
                near = difflib.get_close_matches(unknown[1], flags, n=1, cutoff=0.8)
            hint = f", did you mean {near[0]}?" if near else ""
            _exit(ConfigError(" ".join(message.split()) + hint))
        original(message)

    parser.error = error  # type: ignore[method-assign]


def _exit(error: ConfigError) -> NoReturn:
    print(f"sglang-cake: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None


def _enable_children() -> None:
    """Have children of this process load all hooks."""
    os.environ[ENABLED_ENV] = CHILD_OF_CAKE


def _disable_children() -> None:
    """Undo `_enable_children`, so that a server without cake inherits nothing."""
    value = os.environ.pop(ENABLED_ENV, CHILD_OF_CAKE)
    if value != CHILD_OF_CAKE:
        logger.warning(
            "cake is off: %s=%s has no effect: add --enable-cake, or enable_cake=True in Python",
            ENABLED_ENV,
            value,
        )
