"""SGLang's own launcher, where no step ends early for prompts that are passed."""

import math
import runpy

# SGLang starts its processes with "spawn", which imports the main module again under this name.
if __name__ in ("__main__", "__mp_main__"):
    from sglang_cake.loading import planner

    planner.PASSING_COST = math.inf

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
