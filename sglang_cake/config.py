"""Every setting of cake: name, unit, default, and how it is read from text.

A setting has one name, spelled `--cake-block-tokens` as a flag, `SGLANG_CAKE_BLOCK_TOKENS` in the
environment, `cake_block_tokens` for `sglang.Engine`, and `block_tokens` (or with `-`) in a file.
A flag overrides the environment, which overrides the file, which overrides the default.
"""

import difflib
import importlib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

from sglang_cake.core.codec_names import AUTO, CHOICES, LOSSY, RAW, own_names
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.service_links import without_service_links
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.stores.url import DEFAULT_POLICY, parse_size

ENVIRONMENT_PREFIX: Final = "SGLANG_CAKE_"
CONFIG_ENV: Final = "SGLANG_CAKE_CONFIG"  # path of a settings file
ENABLED_ENV: Final = "SGLANG_CAKE_ENABLED"  # not a setting: tells child processes that cake is on
CHILD_OF_CAKE: Final = "child"  # its value; another one is a user's, who takes it for a switch

_BLOCK_TOKENS: Final = 128
_FILE_TYPES: Final = ".toml, .json, .yaml, .yml"

_T = TypeVar("_T")
_Reader = Callable[[str, object], Any]


def _bad(spelled: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{spelled}: {value!r} is not possible, allowed: {allowed}")


def _one_of(*allowed: str) -> Callable[[str, object], str]:
    def read(spelled: str, value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            near = difflib.get_close_matches(str(value).lower(), allowed, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise _bad(spelled, value, ", ".join(allowed) + hint)
        return value

    return read


def _integer(low: int, high: int) -> Callable[[str, object], int]:
    def read(spelled: str, value: object) -> int:
        number = value
        # Not int(): it also takes " 12" and "1_2", which are mistakes more often than numbers.
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
            number = int(value)
        # For Python bool is an int, but `queue_depth = true` is a mistake.
        if type(number) is not int or not low <= number <= high:
            raise _bad(spelled, value, f"a whole number from {low} to {high}")
        return number

    return read


def _share(spelled: str, value: object) -> float:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if type(number) not in (int, float) or not 0 <= cast(float, number) < 1:  # NaN is neither
        raise _bad(spelled, value, "a number from 0 to less than 1, for example 0.01")
    return float(cast(float, number))


def _size(spelled: str, value: object) -> int:
    number = value
    if isinstance(value, str):
        try:
            number = parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"{spelled}: {error}") from None
    if type(number) is not int or not 0 < number <= 2**50:
        raise _bad(spelled, value, "1 byte to 1PiB, for example 512MiB or 2GB")
    return number


def _store(spelled: str, value: object) -> str:
    if not isinstance(value, str):
        raise _bad(spelled, value, "a URL, for example file:///nvme/kv")
    try:
        parse_sources(value)
    except ConfigError as error:
        raise ConfigError(f"{spelled}: {_one_line(str(error))}") from None
    return value


def _codec(spelled: str, value: object) -> str:
    if value in CHOICES:
        return value
    name = _one_of(*CHOICES, *own_names())(spelled, value)
    from sglang_cake.codecs.registered_codecs import registered_chain

    try:
        registered_chain(name)
    except ConfigError as error:
        raise ConfigError(f"{spelled}: {error}") from None
    return name


def _path(spelled: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _bad(spelled, value, "the path of a file")
    return value


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _setting(default: _T, read: "_Reader", value: str, text: str) -> _T:
    """A field of CakeConfig.

    Args:
        default: None stands for "not set", and may be given as well.
        read: `(spelled, value)` checks a given value; raises ConfigError.
        value: name of the value in help texts.
        text: the help text, in whole sentences.
    """
    metadata = {"read": read, "value": value, "text": text}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class CakeConfig:
    """All settings: what cake does, the host memory that it may use, then KV-Runahead."""

    store: str | None = _setting(
        None,
        _store,
        "URL,...",
        "Where KV is stored: file:///folder?capacity=500GB, http://host:8700, s3://bucket/prefix, "
        "mooncake://host:50051, memory://64GB, or several of them as tiers, fastest first. "
        "Default: a folder in the user's cache folder, with at most half of the free space.",
    )
    mode: Literal["auto", "both", "compute", "load"] = _setting(
        "auto",
        _one_of("auto", "both", "compute", "load"),
        "MODE",
        "How a stored prefix is restored: auto decides by measured costs; both, compute and load "
        "are for benchmarks.",
    )
    codec: str = _setting(
        RAW,
        _codec,
        "CODEC",
        f"How KV is encoded in the store: {', '.join(CHOICES)}, or the codec of an installed "
        "package. Of the built-in ones, only raw and zstd keep every bit.",
    )
    max_error: float = _setting(
        0.0,
        _share,
        "SHARE",
        "Largest error of a block that the codec auto may cause: the root mean square of the "
        "relative errors of K and V of all layers. 0 keeps every bit.",
    )
    block_tokens: int | None = _setting(
        None,
        _integer(1, 65_536),
        "N",
        "Tokens of a stored block, the unit of storing and loading; a multiple of the page size. "
        f"Default: {_BLOCK_TOKENS}, or as many more as whole pages need.",
    )
    head_groups: int | None = _setting(
        None,
        _integer(1, 256),
        "N",
        "The KV heads of the model are stored in N groups, so that servers with fewer "
        "tensor-parallel ranks read the same blocks: the largest number of ranks in the fleet, "
        "on every server. Default: each number of ranks has blocks of its own.",
    )
    min_load_tokens: int = _setting(
        256,
        _integer(0, 2**31 - 1),
        "N",
        "A prompt with fewer loadable tokens is computed. KV-Runahead shares no prompt with fewer "
        "tokens to compute.",
    )
    priority: Literal["adaptive", "fair", "fcfs"] = _setting(
        "adaptive",
        _one_of("adaptive", "fair", "fcfs"),
        "ORDER",
        "Order of prefill: adaptive (shortest remaining time, loading prompts last; with SGLang's "
        "policies lpm and dfs-weight, its order), fair (tenants in turn) or fcfs (SGLang's order).",
    )
    eviction_policy: str = _setting(
        DEFAULT_POLICY,
        _one_of(*POLICIES),
        "POLICY",
        f"Eviction of a full file store whose URL has no policy=: {', '.join(POLICIES)}.",
    )
    record_trace: str | None = _setting(
        None,
        _path,
        "FILE",
        "File to which one line per request is appended, with its hashed blocks, for "
        "`sglang-cake trace replay`.",
    )
    trace_file: str | None = _setting(
        None, _path, "FILE", "File to which one JSON line per event is appended."
    )

    staging_bytes: int | None = _setting(
        None,
        _size,
        "BYTES",
        "Host memory, per rank, for blocks that are being loaded. It holds at least 4 blocks more "
        "than there are concurrent reads. Default: 1GiB.",
    )
    write_queue_bytes: int | None = _setting(
        None,
        _size,
        "BYTES",
        "Host memory, per rank, for blocks that are being stored. A block that finds it full until "
        "its request ends is not stored, and counted. Default: two chunks of prefill, at least "
        "256MiB.",
    )
    queue_depth: int | None = _setting(
        None,
        _integer(1, 1_024),
        "N",
        "Concurrent reads of each tier, per rank. Half as many blocks are written at once, and at "
        "least 2. Default: 16 for s3://, 4 for other stores.",
    )

    runahead_rank: int | None = _setting(
        None,
        _integer(0, 255),
        "N",
        "KV-Runahead: this server's place among the peers, from 0. Default: the only peer with an "
        "address of this machine.",
    )
    runahead_peers: str | None = _setting(
        None,
        _path,
        "HOST:PORT,...",
        "KV-Runahead: addresses of all members, this server's included, by rank; or a file with "
        "one address per line.",
    )
    runahead_secret: str | None = _setting(
        None,
        _path,
        "FILE",
        "KV-Runahead: file with the group's secret, 64 hex digits, mode 0600. Default: the file in "
        "the user's config folder, which is made there if all members are on this machine.",
    )
    runahead_transport: Literal["tcp", "mooncake", "cuda-ipc"] = _setting(
        "tcp",
        _one_of("tcp", "mooncake", "cuda-ipc"),
        "KIND",
        "KV-Runahead: how KV gets from member to member: TCP, Mooncake's transfer engine, or "
        "copies between GPUs of one machine.",
    )

    @property
    def lossy(self) -> bool:
        """Whether KV from the store may differ from what was computed."""
        if self.codec in CHOICES:
            return self.codec in LOSSY or (self.codec == AUTO and self.max_error > 0)
        from sglang_cake.codecs.registered_codecs import registered_chain

        return registered_chain(self.codec).loses

    @property
    def has_group_setting(self) -> bool:
        """Whether any setting of KV-Runahead is not its default. Other servers do not import it."""
        return any(
            getattr(self, field.name) != field.default
            for field in fields(self)
            if field.name.startswith("runahead_")
        )

    def block_tokens_in(self, page_tokens: int) -> int:
        """Tokens of a block: those that are set, or else whole pages of `page_tokens`."""
        return self.block_tokens or -(-_BLOCK_TOKENS // page_tokens) * page_tokens

    def allows_loading(self, stored: Sequence[bool], block_tokens: int) -> bool:
        """Whether enough of a prompt's next blocks are stored to load any of them."""
        tokens = sum(stored) * block_tokens
        return self.mode != "compute" and tokens >= max(1, self.min_load_tokens)


_FIELDS: Final = {field.name: field for field in fields(CakeConfig)}
NAMES: Final = tuple(_FIELDS)

# How an error names a setting where it was given, from its plain name: a flag, a variable, a key.
Spell = Callable[[str], str]


def as_flag(name: str) -> str:
    """`--cake-block-tokens` for `block_tokens`."""
    return "--cake-" + name.replace("_", "-")


def as_variable(name: str) -> str:
    """`SGLANG_CAKE_BLOCK_TOKENS` for `block_tokens`."""
    return ENVIRONMENT_PREFIX + name.upper()


def load_file(path: str) -> dict[str, Any]:
    """The settings in a TOML, JSON or YAML file; a top-level table `cake` may hold them all.

    Raises: ConfigError, one line.
    """
    content = _parse_file(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds no table of settings")
    table = content.get("cake", content)
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: cake is {table!r}, allowed: a table of settings")
    if table is not content and len(content) > 1:
        other = next(name for name in content if name != "cake")
        raise ConfigError(f"{path}: {other!r} stands beside the table 'cake', write it inside")
    named: dict[str, object] = {}
    for key, value in table.items():
        name = str(key).replace("-", "_")
        if name in named:
            raise ConfigError(f"{path}: {name} is given twice")
        named[name] = value
    return _read(named, lambda name: f"{path}: {name}")


def resolve(
    given: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    file: str | None = None,
    spell: Spell = as_flag,
) -> CakeConfig:
    """Settings from all sources: `given` before `environ` before the file before the default.

    Args:
        given: by plain name, as text or typed, what was written on the command line or in a call.
        environ: variables of a process; those of cake are `SGLANG_CAKE_<NAME>`.
        file: settings file named there; None takes the one that SGLANG_CAKE_CONFIG names, if any.
        spell: how an error spells the name of a given setting.

    Raises: ConfigError, one line, for an unknown name, also that of a variable, for a value that is
        not allowed, or two that do not go together.
    """
    variables = {
        variable.removeprefix(ENVIRONMENT_PREFIX): value
        for variable, value in without_service_links(environ).items()
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in (CONFIG_ENV, ENABLED_ENV)
    }
    for name in variables:
        if name != name.upper():
            raise ConfigError(f"{ENVIRONMENT_PREFIX}{name}: write it in capital letters")
    # In order of precedence, so that the first error is about the source that counts most.
    layers = [
        _read(given, spell),
        _read({name.lower(): value for name, value in variables.items()}, as_variable),
    ]
    if file is None:
        file = environ.get(CONFIG_ENV)
    if file is not None:
        layers.append(load_file(file))
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged.update(layer)
    config = CakeConfig(**merged)
    if config.max_error and config.codec != AUTO:
        raise ConfigError(
            f"{spell('max_error')} has no effect with {spell('codec')} {config.codec}: "
            f"it is for {AUTO}, which may choose"
        )
    return config


def _read(mapping: Mapping[str, object], spell: Spell) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in _FIELDS:
            raise ConfigError(_unknown(name, spell))
        setting = _FIELDS[name]
        if value is None and setting.default is None:
            settings[name] = None
        else:
            settings[name] = setting.metadata["read"](spell(name), value)
    return settings


def _unknown(name: str, spell: Spell) -> str:
    near = difflib.get_close_matches(name, NAMES, n=1)
    known = "allowed: " + ", ".join(spell(each).rpartition(": ")[2] for each in NAMES)
    hint = f"did you mean {spell(near[0]).rpartition(': ')[2]}?" if near else known
    return f"{_one_line(spell(name))}: unknown setting, {hint}"


def _parse_file(path: str) -> object:
    kind = Path(path).suffix.lower()
    try:
        text = Path(path).read_text(encoding="utf-8")
        if kind == ".toml":
            return tomllib.loads(text)
        if kind == ".json":
            return json.loads(text)
        if kind in (".yaml", ".yml"):
            return cast(object, importlib.import_module("yaml").safe_load(text))
    except ImportError:
        raise ConfigError(f"{path}: reading YAML needs PyYAML, or write TOML or JSON") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"settings file {path!r} cannot be read: {reason}") from None
    except Exception as error:  # PyYAML's errors have no base class that can be named unimported
        reason = _one_line(str(error))
        raise ConfigError(f"{path}: is not valid {kind[1:].upper()}: {reason}") from None
    raise ConfigError(f"settings file {path!r} has an unknown type, allowed: {_FILE_TYPES}")
