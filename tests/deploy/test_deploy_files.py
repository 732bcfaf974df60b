"""The files of deploy/ pass the validators of their formats, and agree with one another and with
docs/deployment.md."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from deployed import (
    CONTAINERFILE,
    DEPLOY,
    ROOT,
    SBATCH,
    UNITS,
    USER,
    compose,
    container,
    manifests,
    stages,
    unit,
    unit_variables,
)

from sglang_cake.stores.url import parse_size

KUBERNETES = "1.34"
WORST_EXPOSURE = {"cake-store.service": 15, "cake-server.service": 50}  # of 100, systemd's measure
ORDER_BYTES = 400  # of the order of eviction, for a block (docs/deployment.md#host-memory)
WORKERS_BYTES = 4 << 30
PAGE = (ROOT / "docs/deployment.md").read_text()


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a program of the Python environment, or of the system."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed: pip install '.[test]', .ci/setup-tests")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=False)


def compose_faults(file: dict[str, Any]) -> list[str]:
    spec = importlib.util.find_spec("compose")
    if spec is None or spec.origin is None:
        pytest.skip("docker-compose is not installed: pip install --no-deps docker-compose==1.29.2")
    schema = json.loads((Path(spec.origin).parent / "config/compose_spec.json").read_text())
    known = {key: value for key, value in file.items() if key != "name"}  # younger than the schema
    validator = jsonschema.Draft201909Validator(schema)
    return [error.message for error in validator.iter_errors(known)]


def test_containerfile_passes_hadolint() -> None:
    done = tool("hadolint", CONTAINERFILE)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_root_as_the_last_user(tmp_path: Path) -> None:
    path = tmp_path / "Containerfile"
    path.write_text(CONTAINERFILE.read_text().replace(f"USER {USER}:{USER}", "USER root"))
    assert "DL3002" in tool("hadolint", path).stdout


@pytest.mark.parametrize("stage", ["store", "server"])
def test_containerfile_images_run_as_the_user_with_a_home(stage: str) -> None:
    last = dict(stages()[stage])
    assert last["USER"] == f"{USER}:{USER}"
    assert f"useradd --uid {USER} --create-home --home-dir {last['ENV'].partition('=')[2]} " in (
        last["RUN"] + " "
    )


def test_containerfile_copied_paths_exist() -> None:
    copies = [rest for stage in stages().values() for word, rest in stage if word == "COPY"]
    for paths in (rest.split()[:-1] for rest in copies if not rest.startswith("--from=")):
        assert all((ROOT / path).exists() for path in paths), paths


def test_deploy_versions_are_those_of_the_package() -> None:
    import sglang_cake

    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file()]
    versions = re.findall(r"sglang-cake(?:-store)?(?::|, newTag: )(\d[\w.]*)", "\n".join(texts))
    assert len(versions) >= 6
    assert set(versions) == {sglang_cake.__version__}
    pinned = re.search(r"^sglang==(.*)$", (ROOT / "requirements-cpu.lock").read_text(), re.M)
    assert pinned is not None
    assert f"FROM lmsysorg/sglang:v{pinned[1]} AS server" in CONTAINERFILE.read_text()


def test_compose_file_matches_the_schema() -> None:
    assert compose_faults(compose()) == []
    broken = deepcopy(compose())
    broken["services"]["store"]["prots"] = ["1:1"]
    assert len(compose_faults(broken)) == 1


def test_compose_services_are_not_root_and_hold_no_secret() -> None:
    file = compose()
    for service in file["services"].values():
        assert service["user"] == f"{USER}:{USER}"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert set(service.get("secrets", [])) <= file["secrets"].keys()
        for name, value in service.get("environment", {}).items():
            assert "PASSWORD" not in name or (name.endswith("__FILE") and value.startswith("/run/"))
    assert all(set(secret) == {"file"} for secret in file["secrets"].values())


def test_compose_tokens_are_in_mounted_folders_so_that_they_can_be_replaced() -> None:
    """A file that is mounted by itself stays the same one after another is renamed over it."""
    services = compose()["services"]
    mounts = {name: folders_of(service) for name, service in services.items()}
    command = services["store"]["command"]
    tokens = [command[command.index(it) + 1] for it in ("--token-file", "--read-token-file")]
    assert {str(Path(it).parent) for it in tokens} < mounts["store"].keys()
    write, read = (mounts["store"][str(Path(it).parent)] for it in tokens)
    assert write != read
    readers = {name for name, folders in mounts.items() if write in folders.values()}
    assert readers == {"store"}, "Prometheus may only read"


def folders_of(service: dict[str, Any]) -> dict[str, str]:
    """The folders of the host that a service has, by their places in the container."""
    return {(parts := it.split(":"))[1]: parts[0] for it in service["volumes"]}


@pytest.mark.parametrize("resource", manifests().values(), ids=lambda it: it["kind"])
def test_kubernetes_resource_matches_the_schema(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource | {"sepc": {}}, KUBERNETES, strict=True)


def test_kubernetes_manifests_are_all_listed_and_have_no_secret() -> None:
    folder = DEPLOY / "kubernetes"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in folder.iterdir()}
    assert not any(kind == "Secret" for kind, _ in manifests())


@pytest.mark.parametrize("name", ["server", "store"])
def test_kubernetes_pods_have_what_selects_and_mounts_name(name: str) -> None:
    stateful = manifests()["StatefulSet", name]["spec"]
    service = manifests()["Service", stateful["serviceName"]]["spec"]
    labels = stateful["template"]["metadata"]["labels"].items()
    assert stateful["selector"]["matchLabels"].items() <= labels
    assert service["selector"].items() <= labels
    pod = stateful["template"]["spec"]
    volumes = {it["name"] for it in pod["volumes"]}
    volumes |= {it["metadata"]["name"] for it in stateful["volumeClaimTemplates"]}
    mounted = {it["name"] for it in container(name)["volumeMounts"]}
    assert mounted == volumes
    (port,) = container(name)["ports"]
    assert service["ports"] == [
        {"name": "http", "port": port["containerPort"], "targetPort": port["name"]}
    ]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(name)[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert {"requests", "limits"} == container(name)["resources"].keys()


@pytest.mark.parametrize("name", ["server", "store"])
def test_kubernetes_pods_are_restricted(name: str) -> None:
    pod = manifests()["StatefulSet", name]["spec"]["template"]["spec"]
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    own = container(name)["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    # Services would become variables such as SGLANG_CAKE_PORT, which are no settings.
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False


def test_kubernetes_network_policy_admits_the_server_to_the_store() -> None:
    (rule,) = manifests()["NetworkPolicy", "store"]["spec"]["ingress"]
    wanted = rule["from"][0]["podSelector"]["matchLabels"].items()
    for name, admitted in (("server", True), ("store", False)):
        pod = manifests()["StatefulSet", name]["spec"]["template"]
        assert (wanted <= pod["metadata"]["labels"].items()) is admitted


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units, with programs that are on this machine."""
    for path in UNITS:
        text = path.read_text()
        for program in ("sglang-cake", "sglang"):
            text = text.replace(f"/opt/sglang/bin/{program} ", "/bin/true ")
        assert "/opt/" not in text
        (tmp_path / path.name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_unit_passes_verification(installed: Path, path: Path) -> None:
    done = tool("systemd-analyze", "verify", "--man=no", installed / path.name)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_verification_finds_an_unknown_setting(installed: Path) -> None:
    path = installed / UNITS[0].name
    path.write_text(path.read_text().replace("ProtectSystem=", "ProtectSistem="))
    assert "ProtectSistem" in tool("systemd-analyze", "verify", "--man=no", path).stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_unit_is_exposed_no_more_than_it_was(installed: Path, path: Path) -> None:
    most = WORST_EXPOSURE[path.name]
    options = ("security", "--offline=true", f"--threshold={most}", "--no-pager")
    done = tool("systemd-analyze", *options, installed / path.name)
    assert done.returncode == 0, done.stdout
    text = path.read_text().replace("ProtectSystem=strict\n", "").replace("NoNewPrivileges=yes", "")
    weaker = installed / path.name
    weaker.write_text(text.replace("PrivateTmp=yes\n", "").replace("ProtectKernelModules=yes", ""))
    assert tool("systemd-analyze", *options, weaker).returncode != 0


def test_systemd_server_unit_names_no_setting_that_hides_the_gpu() -> None:
    """Before systemd 252, ProtectClock= allows one device, which denies all others."""
    service = unit(DEPLOY / "systemd/cake-server.service")["Service"]
    hiding = {"PrivateDevices", "ProtectClock", "DevicePolicy", "DeviceAllow"}
    assert not hiding & service.keys()


def test_systemd_server_unit_with_the_drop_in_of_the_page_has_the_other_store(
    installed: Path,
) -> None:
    """A drop-in cannot add a second ExecStart=. The folder of the unit is absent there."""
    (drop_in,) = re.findall(r"```ini\n(.*?)```", PAGE, flags=re.DOTALL)
    path = installed / "cake-server.service"
    service = unit(path)["Service"]
    given = unit_variables(drop_in)
    assert given.keys() <= unit_variables(path.read_text()).keys()
    assert "--model-path ${MODEL}" in service["ExecStart"]
    assert service["ExecStart"].endswith("--cake-store ${STORE}")
    assert given["STORE"].startswith("http://kv-host:8700?token_file=/")
    assert service["ReadWritePaths"].startswith("-")
    folder = installed / "cake-server.service.d"
    folder.mkdir()
    (folder / "override.conf").write_text(drop_in)
    done = tool("systemd-analyze", "verify", "--man=no", path)
    assert not done.stderr


def test_systemd_store_unit_has_memory_for_the_order_of_eviction() -> None:
    """Of blocks of 1 MiB, as many as its disk holds, and for its workers."""
    service = unit(DEPLOY / "systemd/cake-store.service")["Service"]
    (capacity,) = re.findall(r"--capacity (\S+)", service["ExecStart"])
    gibibytes = re.fullmatch(r"(\d+)G", service["MemoryMax"])
    assert gibibytes is not None
    assert int(gibibytes[1]) << 30 >= parse_size(capacity) / 2**20 * ORDER_BYTES + WORKERS_BYTES


def test_sbatch_script_passes_shellcheck() -> None:
    done = tool("shellcheck", SBATCH)
    assert done.returncode == 0, done.stdout


def test_sbatch_script_without_a_model_says_what_to_do() -> None:
    done = subprocess.run(
        ["bash", SBATCH], env={"PATH": "/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "set MODEL to the folder of a model" in done.stderr


def test_deploy_files_have_no_long_random_words() -> None:
    for path in (path for path in DEPLOY.rglob("*") if path.is_file()):
        assert not re.search(r"[0-9a-f]{24,}|[A-Za-z0-9+/=]{40,}(?<!/)$", path.read_text()), path


def table(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading of the page."""
    (part,) = re.findall(rf"^#+ {heading}$(.*?)(?=^#|\Z)", PAGE, flags=re.M | re.S)
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_deployment_page_lists_ports_and_folders_of_compose() -> None:
    services = compose()["services"]
    assert [row[0] for row in table("Compose")] == [*services]
    for name, port, folders in table("Compose"):
        (published,) = services[name]["ports"]
        assert published.split(":")[1:] == [port, port]
        mounted = (volume.split(":")[0] for volume in services[name]["volumes"])
        secrets = (compose()["secrets"][it]["file"] for it in services[name].get("secrets", []))
        of_host = {it for it in (*mounted, *secrets) if not it.startswith("./")}
        assert of_host == set(folders.replace("`", "").split(", "))


def test_deployment_page_makes_every_folder_of_compose() -> None:
    made = re.search(r"install -d .*?/srv/cake/\{([\w,]+)\}", PAGE)
    assert made is not None
    folders = {f"/srv/cake/{name}" for name in made[1].split(",")}
    used = {it for row in table("Compose") for it in row[2].replace("`", "").split(", ")}
    tokens = re.search(r"install -d .*? /srv/cake/secrets/\{([\w,]+)\}", PAGE)
    assert tokens is not None
    assert {f"/srv/cake/secrets/{name}" for name in tokens[1].split(",")} < used
    assert {it if "/secrets/" not in it else str(Path(it).parent) for it in used} == folders
    for secret in compose()["secrets"].values():
        assert Path(secret["file"]).name in PAGE


def test_deployment_page_has_paths_of_the_units() -> None:
    for path in UNITS:
        service = unit(path)["Service"]
        assert service["ReadWritePaths"].removeprefix("-") in PAGE
        assert path.name in PAGE
        for file in re.findall(r"-file (\S+)", service["ExecStart"]):
            assert file in PAGE
    assert "kubectl -n sglang-cake create secret generic cake-store" in PAGE
