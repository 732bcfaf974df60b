"""Every setting of cake: name, unit, default, and how it is read from text.

A setting has one name, spelled `--cake-block-tokens` as a flag, `SGLANG_CAKE_BLOCK_TOKENS` in the
environment, `cake_block_tokens` for `sglang.Engine`, and `block_tokens` (or with `-`) in a file.
Where several of them are given: flag before environment before file before default.
"""

import difflib
import importlib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, cast

from sglang_cake.codec_names import AUTO, CHOICES, RAW, may_lose
from sglang_cake.errors import ConfigError
from sglang_cake.store.eviction import POLICIES
from sglang_cake.store.sources import parse_sources
from sglang_cake.store.url import DEFAULT_POLICY, parse_size

ENVIRONMENT_PREFIX: Final = "SGLANG_CAKE_"
CONFIG_ENV: Final = "SGLANG_CAKE_CONFIG"  # path of a settings file
ENABLED_ENV: Final = "SGLANG_CAKE_ENABLED"  # not a setting: tells child processes that cake is on

_MAX_BLOCK_TOKENS: Final = 65_536
_MAX_QUEUE_DEPTH: Final = 1_024
_MAX_BYTES: Final = 2**50  # 1 PiB
_MAX_RANK: Final = 255
_FILE_TYPES: Final = ".toml, .json, .yaml, .yml"


@dataclass(frozen=True, slots=True)
class CakeConfig:
    """What a user may set. First what cake does, then what it may use for that."""

    store: str | None = None
    """URL of the store; None is a file store in the user's cache folder."""
    mode: Literal["auto", "both", "compute", "load"] = "auto"
    """Who provides a stored prefix; auto decides by measured costs, the rest is for benchmarks."""
    codec: str = RAW
    """How KV is encoded in the store, one of `codec_names.CHOICES`; raw and zstd keep every bit."""
    max_error: float = 0.0
    """What auto may lose: relative error of K and of V in any layer; 0 keeps every bit."""
    block_tokens: int = 128
    """Tokens of a block, the unit of storing and loading; a multiple of SGLang's page size."""
    min_load_tokens: int = 256
    """Tokens that must be loadable before a load is worth its overhead."""
    priority: Literal["adaptive", "fair", "fcfs"] = "adaptive"
    """Who is prefilled first: adaptive lets others go before prompts that are being loaded."""
    eviction_policy: str = DEFAULT_POLICY
    """Which block of a full file store goes first, unless its URL says `policy=`."""
    record_trace: str | None = None
    """File to which one JSON line per request is appended, for `sglang-cake trace replay`."""
    trace_file: str | None = None
    """File to which one JSON line per event is appended; None writes no trace."""

    staging_bytes: int = 2**30
    """Bytes of host memory, per rank, for blocks on their way in."""
    write_queue_bytes: int = 256 * 2**20
    """Bytes of host memory, per rank, for blocks on their way out; when full, blocks drop."""
    queue_depth: int = 4
    """Reads of the store in flight at once, per rank."""

    runahead_rank: int | None = None
    """This server's place among the peers, from 0; None: that of the only one on this machine."""
    runahead_peers: str | None = None
    """HOST:PORT of every member, this one too, by rank; or a file of them, one a line."""
    runahead_secret: str | None = None
    """File with what all members know and nobody else does, 16 bytes or more, mode 0600; None: the
    one in the user's config folder, made there if all members are on this machine."""
    runahead_transport: Literal["tcp", "mooncake", "cuda-ipc"] = "tcp"
    """What carries KV from member to member: a TCP connection, Mooncake's transfer engine, or
    copies from GPU to GPU in one machine."""

    @property
    def lossy(self) -> bool:
        """Whether KV from the store may differ from what was computed."""
        return may_lose(self.codec, self.max_error)

    def may_load(self, stored: Sequence[bool]) -> bool:
        """Whether so many of a prompt's next blocks are stored that any may be loaded."""
        least = max(1, self.min_load_tokens // self.block_tokens)
        return self.mode != "compute" and sum(stored) >= least


NAMES: Final = tuple(field.name for field in fields(CakeConfig))

# How an error names a setting where it was given, from its plain name: a flag, a variable, a key.
Spell = Callable[[str], str]


def as_flag(name: str) -> str:
    """`--cake-block-tokens` for `block_tokens`."""
    return "--cake-" + name.replace("_", "-")


def as_variable(name: str) -> str:
    """`SGLANG_CAKE_BLOCK_TOKENS` for `block_tokens`."""
    return ENVIRONMENT_PREFIX + name.upper()


def from_mapping(mapping: Mapping[str, object], *, spell: Spell = str) -> CakeConfig:
    """Settings by plain name, as text or typed.

    Args:
        spell: how an error spells a setting's name.

    Raises: ConfigError, one line, for an unknown name, a value that is not allowed, or two that do
        not go together.
    """
    return _whole(_read(mapping, spell), spell)


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


def from_environment(environ: Mapping[str, str]) -> CakeConfig:
    """The settings in `SGLANG_CAKE_<NAME>` and in the file that SGLANG_CAKE_CONFIG names.

    Raises: ConfigError, one line; also for a variable `SGLANG_CAKE_*` that is no setting.
    """
    return resolve({}, environ)


def resolve(
    given: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    file: str | None = None,
    spell: Spell = as_flag,
) -> CakeConfig:
    """Settings from all sources: `given` before `environ` before the file before the default.

    Args:
        given: by plain name, what was written on the command line or in a call.
        file: settings file named there; None takes the one that SGLANG_CAKE_CONFIG names, if any.

    Raises: ConfigError, one line.
    """
    variables = {
        variable.removeprefix(ENVIRONMENT_PREFIX): value
        for variable, value in environ.items()
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in (CONFIG_ENV, ENABLED_ENV)
    }
    for name in variables:
        if name != name.upper():
            raise ConfigError(f"{ENVIRONMENT_PREFIX}{name}: write it in capital letters")
    # In order of precedence, so that the first error is the one of what counts most.
    layers = [
        _read(given, spell),
        _read({name.lower(): value for name, value in variables.items()}, as_variable),
    ]
    if file is None and environ.get(ENABLED_ENV) != "1":  # else the launcher has read the file
        file = environ.get(CONFIG_ENV)
    if file is not None:
        layers.append(load_file(file))
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged.update(layer)
    return _whole(merged, spell)


def to_environment(config: CakeConfig) -> dict[str, str]:
    """The variables from which a child's `from_environment` reads the same settings again.

    With ENABLED_ENV beside them they are all there is: no file is read a second time.
    """
    return {
        as_variable(name): str(value) for name, value in asdict(config).items() if value is not None
    }


def _whole(settings: Mapping[str, Any], spell: Spell) -> CakeConfig:
    config = CakeConfig(**settings)
    if config.max_error and config.codec != AUTO:
        raise ConfigError(
            f"{spell('max_error')} has no effect with {spell('codec')} {config.codec}: "
            f"it is for {AUTO}, which may choose"
        )
    return config


def _read(mapping: Mapping[str, object], spell: Spell) -> dict[str, Any]:
    settings = {}
    for name, value in mapping.items():
        if name not in _READERS:
            raise ConfigError(_unknown(name, spell))
        settings[name] = _READERS[name](spell(name), value)
    return settings


def _unknown(name: str, spell: Spell) -> str:
    near = difflib.get_close_matches(name, NAMES, n=1)
    known = "allowed: " + ", ".join(spell(each).rpartition(": ")[2] for each in NAMES)
    hint = f"did you mean {spell(near[0]).rpartition(': ')[2]}?" if near else known
    return f"{_one_line(spell(name))}: unknown setting, {hint}"


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
        # Not int(): that takes " 12" and "1_2" too, which are slips more often than numbers.
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
            number = int(value)
        # bool is an int for Python, not for somebody who writes `queue_depth = true`.
        if type(number) is not int or not low <= number <= high:
            raise _bad(spelled, value, f"a whole number from {low} to {high}")
        return number

    return read


def _rank(spelled: str, value: object) -> int | None:
    return None if value is None else _integer(0, _MAX_RANK)(spelled, value)


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
    if type(number) is not int or not 0 < number <= _MAX_BYTES:
        raise _bad(spelled, value, "1 byte to 1PiB, for example 512MiB or 2GB")
    return number


def _store(spelled: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise _bad(spelled, value, "a URL, for example file:///nvme/kv")
    try:
        parse_sources(value)
    except ConfigError as error:
        raise ConfigError(f"{spelled}: {_one_line(str(error))}") from None
    return value


def _path(spelled: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _bad(spelled, value, "the path of a file")
    return value


_READERS: Final[dict[str, Callable[[str, object], Any]]] = {
    "store": _store,
    "mode": _one_of("auto", "both", "compute", "load"),
    "codec": _one_of(*CHOICES),
    "max_error": _share,
    "block_tokens": _integer(1, _MAX_BLOCK_TOKENS),
    "min_load_tokens": _integer(0, 2**31 - 1),
    "priority": _one_of("adaptive", "fair", "fcfs"),
    "eviction_policy": _one_of(*POLICIES),
    "record_trace": _path,
    "trace_file": _path,
    "staging_bytes": _size,
    "write_queue_bytes": _size,
    "queue_depth": _integer(1, _MAX_QUEUE_DEPTH),
    "runahead_rank": _rank,
    "runahead_peers": _path,
    "runahead_secret": _path,
    "runahead_transport": _one_of("tcp", "mooncake", "cuda-ipc"),
}


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


def _one_line(text: str) -> str:
    return " ".join(text.split())
