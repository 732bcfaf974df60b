"""The settings: round trips, precedence, errors that fit on one line and say what is allowed."""

import json
import pickle
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.config import (
    CONFIG_ENV,
    NAMES,
    CakeConfig,
    as_flag,
    as_variable,
    load_file,
    resolve,
)
from sglang_cake.core.codec_names import CODECS
from sglang_cake.core.errors import ConfigError

PATHS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(str.strip)
CONFIGS = st.builds(
    CakeConfig,
    store=st.sampled_from([None, "file:///kv", "file:///a%2Cb?bandwidth=50MB/s&min_free=20GB"]),
    mode=st.sampled_from(["auto", "both", "compute", "load"]),
    codec=st.sampled_from(CODECS),
    block_tokens=st.integers(1, 65_536),
    min_load_tokens=st.integers(0, 2**31 - 1),
    record_trace=st.none() | PATHS,
    trace_file=st.none() | PATHS,
    staging_bytes=st.none() | st.integers(1, 2**50),
    write_queue_bytes=st.none() | st.integers(1, 2**50),
    queue_depth=st.integers(1, 1024),
    runahead_rank=st.none() | st.integers(0, 255),
    runahead_peers=st.none() | PATHS,
    runahead_secret=st.none() | PATHS,
)


@given(CONFIGS)
def test_config_environment_round_trip_is_equal(config: CakeConfig) -> None:
    assert resolve({}, _variables(config)) == config


@given(CONFIGS)
def test_config_pickled_as_for_a_scheduler_is_equal(config: CakeConfig) -> None:
    assert pickle.loads(pickle.dumps(config)) == config


@given(CONFIGS)
def test_config_mapping_round_trip_is_equal_typed_and_as_text(config: CakeConfig) -> None:
    assert resolve(asdict(config), {}, spell=str) == config
    text = {name: str(value) for name, value in asdict(config).items() if value is not None}
    assert resolve(text, {}, spell=str) == config


@given(CONFIGS, CONFIGS, CONFIGS, st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)))
def test_config_flag_overrides_environment_and_environment_overrides_file(
    tmp_path_factory: pytest.TempPathFactory,
    flag: CakeConfig,
    variable: CakeConfig,
    in_file: CakeConfig,
    flags: set[str],
    variables: set[str],
) -> None:
    path = tmp_path_factory.mktemp("config") / "cake.json"
    path.write_text(json.dumps(asdict(in_file)))
    environ = _variables(variable)
    environ = {name: text for name, text in environ.items() if _plain(name) in variables}
    given_flags = {name: text for name, text in _texts(flag).items() if name in flags}
    got = resolve(given_flags, environ | {CONFIG_ENV: str(path)})
    for name in NAMES:
        first = (
            flag if name in given_flags else variable if as_variable(name) in environ else in_file
        )
        assert getattr(got, name) == getattr(first, name)


def _texts(config: CakeConfig) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(config).items() if value is not None}


def _variables(config: CakeConfig) -> dict[str, str]:
    return {as_variable(name): text for name, text in _texts(config).items()}


def _plain(variable: str) -> str:
    return variable.removeprefix("SGLANG_CAKE_").lower()


def test_config_file_flag_replaces_the_file_of_the_environment(tmp_path: Path) -> None:
    for name, depth in (("a", 7), ("b", 8)):
        (tmp_path / f"{name}.toml").write_text(f"queue_depth = {depth}\n")
    environ = {CONFIG_ENV: str(tmp_path / "a.toml")}
    assert resolve({}, environ).queue_depth == 7
    assert resolve({}, environ, file=str(tmp_path / "b.toml")).queue_depth == 8


def test_config_file_of_the_environment_that_is_missing_is_named() -> None:
    assert "/gone.toml" in _message(lambda: resolve({}, {CONFIG_ENV: "/gone.toml"}))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'mode = "load"\nblock-tokens = 64\nstaging_bytes = "2GiB"\n'),
        ("c.toml", '[cake]\nmode = "load"\nblock_tokens = 64\nstaging-bytes = "2GiB"\n'),
        ("c.json", '{"mode": "load", "block-tokens": "64", "staging_bytes": 2147483648}'),
        ("c.yaml", "cake:\n  mode: load\n  block-tokens: 64\n  staging_bytes: 2GiB\n"),
        ("C.YML", "mode: load\nblock_tokens: 64\nstaging_bytes: 2GiB\n"),
    ],
)
def test_config_files_of_every_format_give_equal_settings(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    if name.lower().endswith("ml") and not name.endswith("toml"):
        pytest.importorskip("yaml")
    want = CakeConfig(mode="load", block_tokens=64, staging_bytes=2 * 2**30)
    assert resolve(load_file(str(tmp_path / name)), {}, spell=str) == want


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("c.toml", "mode = \n", "is not valid TOML"),
        ("c.json", '{"mode"\n: }', "is not valid JSON"),
        ("c.json", "[1]", "holds no table"),
        ("c.json", '{"cake": 3}', "allowed: a table of settings"),
        ("c.toml", "port = 1\n[cake]\n", "'port' stands beside the table 'cake'"),
        ("c.toml", "block-tokens = 1\nblock_tokens = 2\n", "block_tokens is given twice"),
        ("c.toml", "queue_depth = true\n", "queue_depth: True is not possible, allowed: a whole"),
        ("c.toml", "block_token = 1\n", "did you mean block_tokens?"),
        ("c.json", '{"mode": null}', "mode: None is not possible, allowed: auto, both"),
        ("c.ini", "mode=load", "has an unknown type, allowed: .toml, .json, .yaml, .yml"),
        ("c.yaml", "a: [\n1", "c.yaml: "),
    ],
)
def test_config_bad_file_is_refused_with_name_and_reason(
    tmp_path: Path, name: str, text: str, part: str
) -> None:
    (tmp_path / name).write_text(text)
    message = _message(lambda: load_file(str(tmp_path / name)))
    assert part in message
    assert name in message


def test_config_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    message = _message(lambda: load_file(str(tmp_path / "none.toml")))
    assert "none.toml" in message
    assert "no such file" in message


BAD: list[tuple[str, object, str]] = [
    ("mode", "laod", "'laod' is not possible, allowed: auto, both, compute, load (did you mean lo"),
    ("mode", "", "allowed: auto, both, compute, load"),
    ("mode", "LOAD", "did you mean load?"),
    ("codec", "zip", "allowed: raw, zstd"),
    ("block_tokens", "0", "allowed: a whole number from 1 to 65536"),
    ("block_tokens", "-1", "'-1'"),
    ("block_tokens", "1e3", "'1e3'"),
    ("block_tokens", "1_000", "'1_000'"),
    ("block_tokens", "²", "'²'"),
    ("block_tokens", 128.0, "128.0"),
    ("min_load_tokens", "many", "'many'"),
    ("queue_depth", "9" * 5000, "a whole number from 1 to 1024"),
    ("queue_depth", 2_000, "2000"),
    ("staging_bytes", "1 gig", "'1 gig'"),
    ("staging_bytes", 0, "1 byte to 1PiB"),
    ("staging_bytes", "0", "1 byte to 1PiB"),
    ("write_queue_bytes", True, "1 byte to 1PiB"),
    ("store", "", "store"),
    ("store", "/nvme/kv", "file:///absolute/path"),
    ("store", "ftp://x\ny", "unknown scheme 'ftp'"),
    ("store", ["file:///kv"], "allowed: a URL"),
    ("store", "file:///kv?bandwith=1MB/s", "bandwith"),
    ("trace_file", "", "allowed: the path of a file"),
    ("blocktokens", "1", "unknown setting, did you mean"),
    ("xyz", "1", "unknown setting, allowed: "),
    ("a\nb", "1", "unknown setting"),
]


@pytest.mark.parametrize(("name", "value", "part"), BAD)
def test_config_bad_value_is_refused_with_name_and_allowed_values(
    name: str, value: object, part: str
) -> None:
    assert part in _message(lambda: resolve({name: value}, {}, spell=str))
    assert part in _message(lambda: resolve({name: value}, {}))
    if "\n" not in name:
        assert as_flag(name) in _message(lambda: resolve({name: value}, {}))
        if isinstance(value, str):
            environ = {as_variable(name): value}
            assert as_variable(name) in _message(lambda: resolve({}, environ))


def test_config_unknown_environment_name_is_refused_with_a_suggestion() -> None:
    assert "SGLANG_CAKE_MODES: unknown setting, did you mean SGLANG_CAKE_MODE?" in _message(
        lambda: resolve({}, {"SGLANG_CAKE_MODES": "load"})
    )
    assert "capital" in _message(lambda: resolve({}, {"SGLANG_CAKE_mode": "load"}))
    assert resolve({}, {"SGLANG_OTHER": "1", "PATH": ""}) == CakeConfig()


@given(st.sampled_from(NAMES), st.text() | st.integers() | st.floats() | st.none() | st.booleans())
def test_config_any_value_is_taken_or_refused_in_one_line(name: str, value: Any) -> None:
    try:
        config = resolve({name: value}, {}, spell=str)
    except ConfigError:
        _message(lambda: resolve({name: value}, {}, spell=str))
    else:
        assert resolve({}, _variables(config)) == config


def test_config_every_field_is_a_setting_with_a_default() -> None:
    assert {field.name for field in fields(CakeConfig)} == set(NAMES)
    assert resolve({}, {}, spell=str) == CakeConfig()


def _message(action: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    message = str(caught.value)
    assert message
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("page_tokens", "block_tokens"), [(1, 128), (64, 128), (128, 128), (48, 144), (256, 256)]
)
def test_config_block_that_is_not_set_has_whole_pages(page_tokens: int, block_tokens: int) -> None:
    assert CakeConfig().block_tokens_in(page_tokens) == block_tokens
    assert CakeConfig(block_tokens=96).block_tokens_in(page_tokens) == 96


@pytest.mark.parametrize(
    "settings", [{"rank": 0}, {"peers": "a:1,b:1"}, {"secret": "file"}, {"transport": "mooncake"}]
)
def test_config_any_runahead_setting_is_a_group_setting(settings: dict[str, Any]) -> None:
    named = {f"runahead_{name}": value for name, value in settings.items()}
    assert CakeConfig(**named).has_group_setting
    assert not CakeConfig().has_group_setting
