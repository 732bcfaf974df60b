"""What the files in deploy/ start: programs with their arguments, and where they listen."""

import json
import os
import re
import shlex
import subprocess
from configparser import RawConfigParser
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
SBATCH = DEPLOY / "slurm/cake-server.sbatch"
CONTAINERFILE = DEPLOY / "Containerfile"
USER = 10001
MODEL = "/some/model"


@dataclass(frozen=True)
class Program:
    """A command line of a file in deploy/, from its first word after the program's path on."""

    source: str
    argv: list[str]
    environment: dict[str, str]


def compose() -> dict[str, Any]:
    """compose.yaml with MODEL set, and all other variables at their defaults."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        assert kind == ":-" or name == "MODEL", match[0]
        return rest if kind == ":-" else MODEL

    text = re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", value, (DEPLOY / "compose.yaml").read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """The resources that kustomization.yaml lists, by kind and name."""
    folder = DEPLOY / "kubernetes"
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    each = (it for name in names for it in yaml.safe_load_all((folder / name).read_text()))
    return {(it["kind"], it["metadata"]["name"]): it for it in each}


def container(name: str) -> dict[str, Any]:
    (found,) = manifests()["StatefulSet", name]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def unit(path: Path) -> dict[str, dict[str, str]]:
    """The sections of a unit; of a key that is there twice, the last value."""
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return {name: dict(parser[name]) for name in parser.sections()}


def unit_variables(text: str) -> dict[str, str]:
    """Of the `Environment=` lines of a unit, or of a drop-in; of several values, the last one."""
    return dict(re.findall(r"^ *Environment=(\w+)=(.*)$", text, flags=re.MULTILINE))


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage of the Containerfile."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = found.setdefault(rest.rpartition(" ")[2], [])
        if word:
            stage.append((word, rest))
    return found


def entrypoint(stage: str) -> list[str]:
    words: list[str] = json.loads(dict(stages()[stage])["ENTRYPOINT"])
    return words[1:]


def sbatch(folder: Path) -> Program:
    """What the script gives to srun. Args: folder: for a stand-in of srun."""
    srun = folder / "srun"
    srun.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@"; printf "SGLANG_CAKE_STORE=%s\\n" "$SGLANG_CAKE_STORE"\n'
    )
    srun.chmod(0o755)
    done = subprocess.run(
        ["bash", SBATCH],
        env={"PATH": f"{folder}:{os.environ['PATH']}", "MODEL": MODEL, "HOME": "/h", "USER": "u"},
        capture_output=True,
        text=True,
        check=True,
    )
    _, program, *argv, store = done.stdout.splitlines()
    assert program == "/h/sglang/bin/sglang"
    name, _, value = store.partition("=")
    return Program("slurm", argv, {name: value})


def programs(folder: Path) -> list[Program]:
    """All of them, with MODEL set. Args: folder: for `sbatch`."""
    found = [sbatch(folder), Program("image", [*entrypoint("store"), *_default("store")], {})]
    for name in ("server", "store"):
        image = entrypoint(name)
        found.append(Program("compose", image + compose()["services"][name]["command"], {}))
        found.append(Program("kubernetes", image + container(name)["args"], {}))
    for path in UNITS:
        variables = unit_variables(path.read_text()) | {"MODEL": MODEL}
        line = Template(unit(path)["Service"]["ExecStart"]).substitute(variables)
        found.append(Program(path.name, shlex.split(line)[1:], {}))
    return found


def _default(stage: str) -> list[str]:
    words: list[str] = json.loads(dict(stages()[stage])["CMD"])
    return words
