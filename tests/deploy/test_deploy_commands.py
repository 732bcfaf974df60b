"""The commands of deploy/ run: SGLang reads those of its servers, and every server of blocks is
started."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from deployed import MODEL, ROOT, Program, programs
from private_files import write_private
from warm import run_forked

PROBE = ROOT / "tests/integration/probe_flags.py"
CPU = ["--device", "cpu", "--attention-backend", "torch_native"]


def test_server_commands_switch_cake_on_with_a_store(tmp_path: Path) -> None:
    write_private(tmp_path / "token", "t" * 32)
    servers = [it for it in programs(tmp_path) if it.argv[0] == "serve"]
    assert len(servers) == 4
    stores = tuple(
        f"file://{tmp_path}/{store}"
        for store in ("kv?capacity=500GB", "cake/kv?", "nvme/kv?", "local/u/kv")
    )
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    here = ("file:///", f"file://{tmp_path}/")
    cases = [
        {
            "argv": [*(word.replace(*here) for word in _with_model(it, tmp_path)), *CPU],
            "env": {name: value.replace(*here) for name, value in it.environment.items()},
        }
        for it in servers
    ]
    clean = {name: value for name, value in os.environ.items() if "SGLANG_CAKE" not in name}
    asked, results = tmp_path / "cases", tmp_path / "results"
    asked.write_text(json.dumps(cases) + "\n")
    done = run_forked(
        [sys.executable, str(PROBE), str(asked), str(results)],
        clean | {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"},
        tmp_path,
        timeout_s=300,
    )
    assert done.returncode == 0, done.stdout
    for server, result in zip(servers, json.loads(results.read_text()), strict=True):
        assert result.get("backend") == "cake", (server.source, result)
        assert result["settings"]["store"].startswith(stores), (
            server.source,
            result,
        )


def _with_model(server: Program, folder: Path) -> list[str]:
    """Its flags, with a model and a token that are there."""
    words = server.argv[1:]
    for theirs, ours in (("=Qwen/Qwen3-8B", f"={folder}"), ("/run/secrets/cake", str(folder))):
        words = [word.replace(theirs, ours) for word in words]
    return [str(folder) if it == MODEL else it for it in words]


STORES = ("image", "compose", "kubernetes", "cake-store.service")


@pytest.mark.parametrize("source", STORES)
def test_store_command_serves_its_tokens(tmp_path: Path, source: str) -> None:
    (store,) = [it for it in programs(tmp_path) if (it.source, it.argv[0]) == (source, "store")]
    words = [word for argument in store.argv for word in argument.split("=", 1)]
    home = tmp_path / "home"
    tokens = {"--token-file": home / "token", "--read-token-file": home / "read-token"}
    (home / ".config/sglang_cake").mkdir(parents=True)
    tokens["own"] = home / ".config/sglang_cake/store-token"
    for path in tokens.values():
        write_private(path, path.name * 4)
    here = {name: str(path) for name, path in tokens.items()} | {
        "--root": str(tmp_path / "kv"),
        "--host": "127.0.0.1",
    }
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert given["--host"] == "0.0.0.0"
    assert given["--root"] in ("/cake/kv", "/kv", "/nvme/kv")
    options = [it for name, value in given.items() for it in (name, here.get(name, value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_cake", "store", "serve", *options, "--port", "0"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home), "XDG_CONFIG_HOME": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is served at " in line, line
        base = line.split()[-1]
        assert _ask(f"{base}/health", "") == 200
        assert _ask(f"{base}/metrics", "") == 401
        own = source == "image"
        for name in ("own",) if own else ("--token-file", "--read-token-file"):
            assert _ask(f"{base}/metrics", tokens[name].read_text()) == 200
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.communicate()


def _ask(url: str, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
