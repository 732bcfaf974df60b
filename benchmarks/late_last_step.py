"""SGLang's own launcher with Cake, whose last steps begin only when all KV is there.

    python -m benchmarks.late_last_step --model-path ... --enable-cake ...

The other arm of `bench_last_step`. SGLang starts its processes with "spawn", which imports the main
module again, so what is replaced here holds in the scheduler too.
"""

import runpy

if __name__ in ("__main__", "__mp_main__"):
    from sglang_cake.adapter import build

    build.may_overlap = lambda ctx, config: False  # type: ignore[attr-defined]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
