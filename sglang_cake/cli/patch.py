"""`sglang-cake patch status|apply|revert`: the CPU repairs of the installed SGLang.

SGLang is found and never imported: without the repairs it cannot be.

    installed --take off what is on--> released --put all on--> repaired
                                          |
                                          must have the hash that the wheel recorded

Both ends are worked out in memory for every file before the first one is written. `apply` writes
the repaired form and `revert` the released one, whatever mixture an interrupted run left behind.
"""

import argparse
import base64
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import sglang_cake
from sglang_cake.cli.diff import DiffError, FileDiff, apply, parse
from sglang_cake.errors import PatchError


class State(Enum):
    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    PARTLY = "partly applied"  # an interrupted run; both apply and revert finish it
    MISFIT = "does not fit"


@dataclass(frozen=True)
class Patch:
    name: str
    files: tuple[FileDiff, ...]


@dataclass(frozen=True)
class Installation:
    """An installed SGLang.

    `site` is the folder that holds `sglang/`; `recorded` maps a path below it to the sha256 of the
    released file, in the form of a wheel's RECORD (urlsafe base64 without padding).
    """

    site: Path
    version: str
    recorded: Mapping[str, str]

    def read(self, path: str) -> bytes:
        try:
            return (self.site / path).read_bytes()
        except OSError as error:
            raise PatchError(f"cannot read {path} of SGLang: {error.strerror}") from error


@dataclass(frozen=True)
class Plan:
    """All forms of every file that a patch names, by path, and what was found."""

    installed: Mapping[str, bytes]
    released: Mapping[str, bytes]
    repaired: Mapping[str, bytes]
    states: Mapping[str, State]
    misfits: tuple[str, ...]


def find_installation() -> Installation:
    """Locate SGLang in this environment without importing it. Raises: PatchError."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError("SGLang is not installed in this environment")
    try:
        distribution = importlib.metadata.distribution("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise PatchError("the installed SGLang has no metadata to tell its version") from error
    recorded = {
        file.as_posix(): file.hash.value
        for file in distribution.files or ()
        if file.hash is not None and file.hash.mode == "sha256"
    }
    site = Path(next(iter(spec.submodule_search_locations))).parent
    return Installation(site=site, version=distribution.version, recorded=recorded)


def patches_root() -> Path:
    """The folder of the `sglang-VERSION/` folders: in the wheel, else in the checkout."""
    package = Path(sglang_cake.__file__).parent
    for root in (package / "_patches", package.parent / "patches"):
        if root.is_dir():
            return root
    raise PatchError("this installation of sglang-cake lacks its patches; install it again")


def load_patches(version: str, root: Path) -> list[Patch]:
    """Read the patches for one SGLang version, in order. Raises: PatchError if there are none."""
    prefix = "sglang-"
    folder = root / f"{prefix}{version}"
    if not folder.is_dir():
        known = ", ".join(
            sorted(path.name.removeprefix(prefix) for path in root.glob(f"{prefix}*"))
        )
        raise PatchError(f"no repairs for SGLang {version}; there are some for {known or 'none'}")
    patches = []
    for path in sorted(folder.glob("*.patch")):
        try:
            patches.append(Patch(path.stem, tuple(parse(path.read_bytes()))))
        except DiffError as error:
            raise PatchError(f"{path.name} is damaged: {error}") from error
    return patches


def make_plan(
    patches: Iterable[Patch], installed: Mapping[str, bytes], recorded: Mapping[str, str]
) -> Plan:
    """Work out both forms of every file. Pure. A misfit is reported in the plan, not raised."""
    patches = list(patches)
    released, repaired = dict(installed), dict[str, bytes]()
    found: dict[str, list[bool]] = {patch.name: [] for patch in patches}
    for patch in reversed(patches):
        for diff in patch.files:
            try:
                released[diff.path] = apply(released[diff.path], diff.reversed())
            except DiffError:
                found[patch.name].append(False)
            else:
                found[patch.name].append(True)
    repaired.update(released)
    states = {name: _state(applied) for name, applied in found.items()}
    misfits = []
    for patch in patches:
        for diff in patch.files:
            # A hunk can fit a file that was changed elsewhere; the recorded hash sees that too.
            wanted = recorded.get(diff.path)
            if wanted is not None and _record_hash(released[diff.path]) != wanted:
                misfits.append(f"{diff.path} is not the released file")
                states[patch.name] = State.MISFIT
                continue
            try:
                repaired[diff.path] = apply(repaired[diff.path], diff)
            except DiffError as error:
                misfits.append(str(error))
                states[patch.name] = State.MISFIT
    return Plan(installed, released, repaired, states, tuple(misfits))


def _state(applied: list[bool]) -> State:
    if all(applied):
        return State.APPLIED
    return State.PARTLY if any(applied) else State.NOT_APPLIED


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def write_files(site: Path, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> int:
    """Replace the files that differ and return their number.

    Every new file is complete on disk before the first one takes its place, so a full disk
    changes nothing. Replacing also leaves alone what a package manager hard-linked elsewhere.

    Raises: PatchError.
    """
    changed = [path for path, content in after.items() if content != before[path]]
    staged: list[tuple[str, Path]] = []
    try:
        for path in changed:
            target = site / path
            handle, temporary = tempfile.mkstemp(prefix=".sglang-cake-", dir=target.parent)
            staged.append((temporary, target))
            with os.fdopen(handle, "wb") as file:
                file.write(after[path])
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, target.stat().st_mode & 0o7777)
        for temporary, target in staged:
            os.replace(temporary, target)
    except OSError as error:
        raise PatchError(f"cannot write into SGLang: {error.strerror}") from error
    finally:
        for temporary, _ in staged:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    return len(changed)


def execute(action: str, installation: Installation, root: Path) -> int:
    """Do `status`, `apply` or `revert` and return the exit status. Raises: PatchError."""
    patches = load_patches(installation.version, root)
    paths = {diff.path for patch in patches for diff in patch.files}
    installed = {path: installation.read(path) for path in sorted(paths)}
    plan = make_plan(patches, installed, installation.recorded)
    if action == "status":
        for name, state in plan.states.items():
            print(f"{name}: {state.value}")
        return 2 if plan.misfits else 0
    if plan.misfits:
        raise PatchError(f"nothing was changed: {plan.misfits[0]} (SGLang {installation.version})")
    after = plan.repaired if action == "apply" else plan.released
    number = write_files(installation.site, plan.installed, after)
    done = "applied" if action == "apply" else "reverted"
    print(f"{len(patches)} patches {done}, {number} files of SGLang {installation.version} changed")
    return 0


def run(args: argparse.Namespace) -> int:
    """Exit status 0, or 2 with one line on stderr."""
    try:
        return execute(args.action, find_installation(), patches_root())
    except PatchError as error:
        print(f"sglang-cake: {error}", file=sys.stderr)
        return 2


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "patch", help="repair the installed SGLang for a machine without a GPU"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("status", help="say which repairs are applied")
    actions.add_parser("apply", help="apply all repairs, or none if one does not fit")
    actions.add_parser("revert", help="put back the released files")
    parser.set_defaults(run=run)
