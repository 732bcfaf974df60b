"""`python probe_flags.py CASES RESULTS`, for tests: many cases in one process.

Each line of the file CASES is a JSON list of cases. For each, the script writes a line to the file
RESULTS: a JSON list of results. Either may be a named pipe. A case is one of these:

- {"argv": [...]}, a command line;
- {"engine": {...}}, keywords of `sglang.Engine`;
- {"raw": {...}}, keywords of ServerArgs.

With "env", these variables are set; with "resolve", the settings are resolved as by the launcher;
with "machine", SGLang takes these as facts of this machine.
"""

import contextlib
import io
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_cake.core.errors import ConfigError


def main() -> None:
    load_plugins()
    with open(sys.argv[1]) as cases, open(sys.argv[2], "w") as results:
        for line in cases:
            print(json.dumps([run(case) for case in json.loads(line)]), file=results, flush=True)


def run(case: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(case.get("env", {}))
    stderr = io.StringIO()
    result: dict[str, Any] = {}
    try:
        with contextlib.redirect_stderr(stderr), machine(case):
            args = build(case)
            if case.get("resolve"):
                args.resolve_once()
        result |= {"backend": args.radix_cache_backend, "env": cake_environment()}
        config = getattr(args, "_cake_config", None)
        result["settings"] = None if config is None else asdict(config)
        result["graphs"] = args.cuda_graph_backend_prefill
    except SystemExit as error:
        result["exit"] = error.code
    except ConfigError as error:
        result["error"] = str(error)
    except Exception as error:  # of SGLang; the other cases run
        result |= {"exit": 1, "error": repr(error)}
    finally:
        for name in case.get("env", {}):
            os.environ.pop(name, None)
    lines = stderr.getvalue().splitlines()
    result["stderr"] = [line for line in lines if line.startswith("sglang-cake")]
    result["usage"] = any(line.startswith("usage") for line in lines)
    result["env_after"] = cake_environment()
    return result


def machine(case: dict[str, Any]) -> contextlib.AbstractContextManager[object]:
    if "machine" not in case:
        return contextlib.nullcontext()
    from sglang.srt.runtime_context import override_platform

    return override_platform(**case["machine"])


def build(case: dict[str, Any]) -> Any:
    if "argv" in case:
        return prepare_server_args(case["argv"])
    if "raw" in case:
        return ServerArgs(**case["raw"])
    # What Engine.__init__ does with its keywords; the rest of it would load a model.
    return Engine.__new__(Engine).server_args_class(**case["engine"])


def cake_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("SGLANG_CAKE_")}


if __name__ == "__main__":
    main()
