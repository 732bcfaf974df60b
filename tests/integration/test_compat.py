"""compat.toml has every name of SGLang that the integration uses; the check finds differences."""

import ast
import logging
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import sglang
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs

import sglang_cake
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration import compat
from sglang_cake.integration.identity.kv_settings import argument_class
from sglang_cake.integration.support_matrix import RULES

PACKAGE = Path(sglang_cake.__file__).parent
FILES = sorted((PACKAGE / "integration").rglob("*.py"))
TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
BASES = {"UnifiedRadixCache": TREE, "PrefillAdder": ADDER}
# The type of a parameter, as this package writes it -> the class of SGLang whose attributes it has.
TYPES = {
    "Req": "sglang.srt.managers.schedule_batch.Req",
    "MultimodalDataItem": "sglang.srt.managers.schedule_batch.MultimodalDataItem",
    "MultimodalInputs": "sglang.srt.managers.schedule_batch.MultimodalInputs",
    "MultimodalProcessorOutput": "sglang.srt.managers.schedule_batch.MultimodalProcessorOutput",
    "ScheduleBatch": "sglang.srt.managers.schedule_batch.ScheduleBatch",
    "Scheduler": "sglang.srt.managers.scheduler.Scheduler",
    "DecodeTransferQueue": "sglang.srt.disaggregation.decode.DecodeTransferQueue",
    "DecodeRequest": "sglang.srt.disaggregation.decode.DecodeRequest",
    "MetadataBuffers": "sglang.srt.disaggregation.utils.MetadataBuffers",
    "SchedulePolicy": "sglang.srt.managers.schedule_policy.SchedulePolicy",
    "PrefillAdder": ADDER,
    "UnifiedRadixCache": TREE,
    "ModelConfig": "sglang.srt.configs.model_config.ModelConfig",
    "TreeCacheBuildContext": "sglang.srt.mem_cache.registry.TreeCacheBuildContext",
    "ServerArgs": compat.SERVER_ARGS,
}
# What functions of SGLang return: the settings, also as views of them.
RETURNED = ("resolving_view(", "get_serving(")
FIELDS = {field.name for field in record_fields(ServerArgs)}


def used_names() -> dict[str, set[str]]:
    """Class or module of SGLang -> the names of it that the integration uses."""
    used: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                used[node.module or ""] |= {alias.name for alias in node.names}
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                read_parameters(node, used)
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in BASES:
                        read_subclass(node, BASES[base.id], used)
        read_settings(tree, used)
        read_hooks(path, tree, used)
    used[compat.SERVER_ARGS] |= {field for field, _, _ in RULES}
    used[compat.SERVER_ARGS] |= {name for name in FIELDS if argument_class(name) == "content"}
    return used


def read_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, used) -> None:
    kinds = {}
    for arg in (*function.args.args, *function.args.kwonlyargs):
        if arg.annotation is not None:
            annotation = ast.unparse(arg.annotation).strip("'\"").removesuffix(" | None")
            if annotation in TYPES:
                kinds[arg.arg] = TYPES[annotation]
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and (owner := kinds.get(ast.unparse(node.value))):
            used[owner].add(node.attr)
        elif isinstance(node, ast.Constant) and compat.SERVER_ARGS in kinds.values():
            used[compat.SERVER_ARGS] |= {node.value} & FIELDS  # for `getattr`


def read_settings(tree: ast.Module, used) -> None:
    """The attributes of what RETURNED gives, and of a name that it is assigned to."""
    nodes = list(ast.walk(tree))
    names = {
        ast.unparse(node.targets[0])
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(RETURNED)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute):
            value = ast.unparse(node.value)
            if value in names or (isinstance(node.value, ast.Call) and value.startswith(RETURNED)):
                used[compat.SERVER_ARGS].add(node.attr)


def read_subclass(found: ast.ClassDef, base: str, used) -> None:
    """The names of the base that it overrides, or reads from `self` or `super()`."""
    for node in ast.walk(found):
        name = None
        if isinstance(node, ast.FunctionDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.attr if node.value.id == "self" else None
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()":
            name = node.attr
        if name is not None and compat.signature(base, name) is not None:
            used[base].add(name)


def read_hooks(path: Path, tree: ast.Module, used) -> None:
    """Every string that is the dotted name of a function of SGLang. Such a name may begin with a
    constant of the module."""
    known = {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    texts = [text for text in known.values() if isinstance(text, str)]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.FormattedValue):
            start = str(known.get(ast.unparse(node.values[0].value), ""))
            if start.startswith("sglang.") and all(
                isinstance(part, ast.Constant) for part in node.values[1:]
            ):
                texts.append(start + "".join(part.value for part in node.values[1:]))
    for text in texts:
        if text.startswith("sglang.") and "/" not in text and compat.module_source(text) is None:
            owner, _, name = text.rpartition(".")
            used[owner].add(name)


def test_used_names_are_in_the_table() -> None:
    table = compat.read_names()
    missing = {
        owner: names - table.get(owner, {}).keys()
        for owner, names in used_names().items()
        if names - table.get(owner, {}).keys()
    }
    assert not missing


def test_private_names_are_used_only_in_compat() -> None:
    private = {
        name
        for owner, names in compat.read_names().items()
        for name in names
        if name.startswith("_") and not name.startswith("__") and owner != ADDER
    } | {"_lock_node"}
    for path in FILES:
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in private, f"{path.name}:{node.lineno} {node.attr}"


# Private names of other libraries, and the public `_replace` of NamedTuples.
OF_OTHERS = {"_StoreTrueAction", "_cache", "_foreach_copy_", "_new_shared_cuda", "_replace"}
OF_OTHERS |= {"_share_cuda_"}


def test_private_names_that_the_package_does_not_define_are_known() -> None:
    own, others = set(), defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                own.add(node.id)
            elif not isinstance(node, ast.Attribute):
                own.add(getattr(node, "name", None))
            elif ast.unparse(node.value) in ("self", "cls", "super()"):
                own.add(node.attr)
            elif re.match("_[^_]", node.attr) and path.name != "compat.py":
                others[node.attr].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not {name: places for name, places in others.items() if name not in own | OF_OTHERS}


def test_compat_installed_version_has_no_differences() -> None:
    assert compat.differences() == []


def test_compat_finds_every_server_argument() -> None:
    assert {compat.signature(compat.SERVER_ARGS, name) for name in FIELDS} == {compat.ATTRIBUTE}


def test_compat_renamed_server_argument_is_named_by_the_check_at_start(tmp_path: Path) -> None:
    """In a copy of SGLang, of links but for one file."""
    original, copy = Path(sglang.__file__).parent, tmp_path / "sglang"
    files = [original / "srt/server_args.py", *original.glob("srt/arg_groups/fields/*.py")]
    declaration = "\n    enable_hisparse:"
    (file,) = (each for each in files if declaration in each.read_text())
    for part in file.relative_to(original).parts:
        copy.mkdir()
        for each in original.iterdir():
            if each.name != part:
                (copy / each.name).symlink_to(each)
        original, copy = original / part, copy / part
    copy.write_text(file.read_text().replace(declaration, "\n    enable_sparse_cache:"))
    check = "from sglang_cake.integration import compat; print(compat.differences())"
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", check], env=os.environ | paths, capture_output=True, text=True
    )
    assert done.stdout == "['server_args.ServerArgs.enable_hisparse is missing']\n", done.stderr


def test_differences_are_all_reported_at_once() -> None:
    names = {
        "sglang.srt.managers.scheduler.Scheduler": {
            "waiting_queue": "",
            "run_batch": "(self, surprise)",
            "no_such_method": "(self)",
        },
        "sglang.srt.no_such_module": {"anything": ""},
    }
    found = compat.differences(names)
    assert [line.split()[0].partition("(")[0] for line in found] == [
        "managers.scheduler.Scheduler.run_batch",
        "managers.scheduler.Scheduler.no_such_method",
        "no_such_module.anything",
    ]


def test_compat_name_with_several_forms_is_each_of_them() -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    names: compat.Names = {scheduler: {"run_batch": ["(self, surprise)", "(self, other)"]}}
    assert "instead of (self, surprise) or (self, other)" in compat.differences(names)[0]
    actual = compat.signature(scheduler, "run_batch")
    assert actual is not None
    assert compat.differences({scheduler: {"run_batch": ["(self, surprise)", actual]}}) == []


def test_compat_only_a_checked_version_may_lack_a_name() -> None:
    names: compat.Names = {"sglang.version": {"no_such_name": ["", compat.MISSING]}}
    assert compat.differences(names, "0.5.22") == []
    assert compat.differences(names, "0.6.0") == ["sglang.version.no_such_name is missing"]


@pytest.mark.skipif(compat.INSTALLED != "0.5.22", reason="the newer versions have all names")
def test_compat_names_that_may_be_missing_are_not_in_the_oldest_version() -> None:
    optional = [
        (owner, name)
        for owner, names in compat.read_names().items()
        for name, forms in names.items()
        if compat.MISSING in forms
    ]
    assert optional
    assert not [each for each in optional if compat.signature(*each) is not None]


def test_compat_unchecked_version_with_all_names_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "sglang_cake"):
        names: compat.Names = {"sglang.version": {"__version__": ""}}
        compat.require("0.6.0", names)
        compat.require("0.6.0", names)
        compat.require("0.5.23", names)
    (record,) = caplog.records
    assert "0.6.0" in record.getMessage()


def test_compat_version_with_differences_is_refused_in_one_line() -> None:
    names = {
        "sglang.version": {"no_such_name": ""},
        "sglang.srt.runtime_context": {"get_parallel": "(surprise)"},
    }
    with pytest.raises(ConfigError) as error:
        compat.require("0.6.0", names)
    missing = "sglang.version.no_such_name is missing"
    changed = "runtime_context.get_parallel() instead of (surprise)"
    assert f"{missing}; {changed}" in str(error.value)
    assert "\n" not in str(error.value)
