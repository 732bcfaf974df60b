"""`sglang-cake patch status|apply|revert`: the CPU repairs of the installed SGLang.

The command locates SGLang and never imports it: without the repairs the import fails on a machine
without a GPU.

    installed --revert applied patches--> released --apply all patches--> repaired
                                             |
                                             must have the hash that the wheel recorded

All released and repaired files are computed in memory before the first file is written. `apply`
writes the repaired files and `revert` the released ones, also after an interrupted run.
"""

import argparse
import base64
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import sglang_cake
from sglang_cake.cli.unified_diff import DiffError, FileDiff, apply, parse
from sglang_cake.core.errors import PatchError


class PatchState(Enum):
    """State of one patch in the installed files; `status` prints the value."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    PARTLY_APPLIED = "partly applied"  # by an interrupted run; `apply` and `revert` complete it
    CONFLICT = "does not fit"


@dataclass(frozen=True)
class Installation:
    """An installed SGLang.

    Attributes:
        site: folder that contains `sglang/`.
        recorded: SHA-256 of the released files by path below `site`, as in a wheel's RECORD
            (urlsafe base64 without padding).
    """

    site: Path
    version: str
    recorded: Mapping[str, str]

    def read(self, path: str) -> bytes:
        """Content of the file at `path` below `site`. Raises: PatchError."""
        try:
            return (self.site / path).read_bytes()
        except OSError as error:
            raise PatchError(f"cannot read {path} of SGLang: {error.strerror}") from error


@dataclass(frozen=True)
class PatchPlan:
    """Contents by path of every file that a patch changes, and the state of the patches.

    Attributes:
        states: by the name of the patch.
        conflicts: one line for each file that cannot be repaired; nothing is written then.
    """

    installed: Mapping[str, bytes]
    released: Mapping[str, bytes]
    repaired: Mapping[str, bytes]
    states: Mapping[str, PatchState]
    conflicts: tuple[str, ...]


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
    """Folder with the `sglang-VERSION/` folders, of the wheel or a checkout. Raises: PatchError."""
    package = Path(sglang_cake.__file__).parent
    for root in (package / "_patches", package.parent / "patches"):
        if root.is_dir():
            return root
    raise PatchError("this installation of sglang-cake lacks its patches; install it again")


def load_patches(version: str) -> dict[str, list[FileDiff]]:
    """Patches for one version of SGLang, in the order of application, by the names of their files
    without `.patch`.

    Raises: PatchError: there are none, or a patch file is damaged.
    """
    prefix = "sglang-"
    root = patches_root()
    folder = root / f"{prefix}{version}"
    if not folder.is_dir():
        known = ", ".join(
            sorted(path.name.removeprefix(prefix) for path in root.glob(f"{prefix}*"))
        )
        raise PatchError(f"no repairs for SGLang {version}; there are some for {known or 'none'}")
    patches = {}
    for path in sorted(folder.glob("*.patch")):
        try:
            patches[path.stem] = parse(path.read_bytes())
        except DiffError as error:
            raise PatchError(f"{path.name} is damaged: {error}") from error
    return patches


def make_plan(
    patches: dict[str, list[FileDiff]],
    installed: Mapping[str, bytes],
    recorded: Mapping[str, str],
) -> PatchPlan:
    """Compute the released and the repaired content of every file. Pure.

    Conflicts are part of the plan and are not raised.
    """
    released = dict(installed)
    applied: dict[str, list[bool]] = {name: [] for name in patches}
    for name, diffs in reversed(patches.items()):
        for diff in diffs:
            try:
                released[diff.path] = apply(released[diff.path], diff.reversed())
                applied[name].append(True)
            except DiffError:
                applied[name].append(False)
    repaired = dict(released)
    states = {name: _state(files) for name, files in applied.items()}
    conflicts = []
    for name, diffs in patches.items():
        for diff in diffs:
            wanted = recorded.get(diff.path)
            try:
                # Hunks can fit although the file was changed elsewhere.
                if wanted is not None and _record_hash(released[diff.path]) != wanted:
                    raise DiffError(f"{diff.path} is not the released file")
                repaired[diff.path] = apply(repaired[diff.path], diff)
            except DiffError as error:
                conflicts.append(str(error))
                states[name] = PatchState.CONFLICT
    return PatchPlan(installed, released, repaired, states, tuple(conflicts))


def _state(applied: list[bool]) -> PatchState:
    """Args: applied: for each file of the patch, whether it can be reverted."""
    if all(applied):
        return PatchState.APPLIED
    return PatchState.PARTLY_APPLIED if any(applied) else PatchState.NOT_APPLIED


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def write_files(site: Path, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> int:
    """Replace the files that differ and return their number.

    Every new file is complete on disk before the first one is renamed, so a full disk changes
    nothing. A rename also leaves the hard links of package managers to the old file intact.

    Args: before, after: contents by path below `site`.
    Raises: PatchError: a file cannot be written.
    """
    changed = [path for path, content in after.items() if content != before[path]]
    staged: list[tuple[str, Path]] = []
    try:
        for path in changed:
            destination = site / path
            handle, temporary = tempfile.mkstemp(prefix=".sglang-cake-", dir=destination.parent)
            staged.append((temporary, destination))
            with os.fdopen(handle, "wb") as file:
                file.write(after[path])
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, destination.stat().st_mode & 0o7777)
        for temporary, destination in staged:
            os.replace(temporary, destination)
    except OSError as error:
        raise PatchError(f"cannot write into SGLang: {error.strerror}") from error
    finally:
        for temporary, _ in staged:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    return len(changed)


def plan_of(installation: Installation) -> PatchPlan:
    """The plan for an installed SGLang.

    Raises: PatchError: there are no patches for this SGLang, or a file cannot be read.
    """
    patches = load_patches(installation.version)
    paths = {diff.path for diffs in patches.values() for diff in diffs}
    installed = {path: installation.read(path) for path in sorted(paths)}
    return make_plan(patches, installed, installation.recorded)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status.

    Raises: PatchError: there are no patches for this SGLang, a file cannot be read or written, or a
        patch conflicts.
    """
    installation = find_installation()
    plan = plan_of(installation)
    if args.action == "status":
        for name, state in plan.states.items():
            print(f"{name}: {state.value}")
        return 2 if plan.conflicts else 0
    if plan.conflicts:
        raise PatchError(
            f"nothing was changed: {plan.conflicts[0]} (SGLang {installation.version})"
        )
    after = plan.repaired if args.action == "apply" else plan.released
    number = write_files(installation.site, plan.installed, after)
    done = "applied" if args.action == "apply" else "reverted"
    changed = f"{number} files of SGLang {installation.version} changed"
    print(f"{len(plan.states)} patches {done}, {changed}")
    return 0


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `patch` to the command line."""
    parser = subparsers.add_parser(
        "patch", help="repair the installed SGLang for a machine without a GPU"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("status", help="say which repairs are applied")
    actions.add_parser("apply", help="apply all repairs, or none if one does not fit")
    actions.add_parser("revert", help="put back the released files")
    parser.set_defaults(run=run)
