"""SGLang's own launcher, with a clock on every prefill step; the same for every arm.

    BENCH_STEPS_FILE=steps.jsonl python -m benchmarks.step_clock --model-path ...

One JSON line per prefill step: `rid`; `tokens` that it computes; `schedule_s`, the time in
`get_next_batch_to_run` (where SGLang books the chunk before, and Cake polls, copies new blocks off
the device and plans); `run_s`, the time in `run_batch`; `step_s`, from the end of the step before
to the end of this one, so that nothing in between is missed (for a request's first step: schedule
and run alone); and the CPU time of that, of the scheduler thread (`thread_s`) and of all threads of
the process (`process_s`), which another process on the machine disturbs least.
"""

import json
import os
import runpy
import time
from typing import IO, Any

STEPS_ENV = "BENCH_STEPS_FILE"


class StepClock:
    """Wraps two methods of the scheduler. Scheduler thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._out: IO[str] | None = None  # opened where it is written: several processes import us
        self._rid = ""  # whose step was the last one
        self._before = (0.0, 0.0, 0.0)  # the clocks at its end
        self._scheduled = (0.0, 0.0, 0.0)  # the clocks when the step under way began to be planned
        self._schedule_s = 0.0

    def install(self, scheduler_class: Any) -> None:
        """Replace the methods."""
        plain_next, plain_run = scheduler_class.get_next_batch_to_run, scheduler_class.run_batch

        def get_next_batch_to_run(*args: Any, **kwargs: Any) -> Any:
            self._scheduled = _clocks()
            try:
                return plain_next(*args, **kwargs)
            finally:
                self._schedule_s = time.perf_counter() - self._scheduled[0]

        def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return plain_run(scheduler, batch, *args, **kwargs)
            finally:
                self._ran(batch, begun_s)

        scheduler_class.get_next_batch_to_run = get_next_batch_to_run
        scheduler_class.run_batch = run_batch

    def _ran(self, batch: Any, begun_s: float) -> None:
        now = _clocks()
        if not batch.forward_mode.is_extend() or not batch.reqs:
            self._rid = ""
            return
        rid = batch.reqs[0].rid
        since = self._before if rid == self._rid else self._scheduled
        took = [round(end - begin, 7) for begin, end in zip(since, now, strict=True)]
        line = {
            "rid": rid,
            "tokens": batch.extend_num_tokens,
            "schedule_s": round(self._schedule_s, 7),
            "run_s": round(now[0] - begun_s, 7),
            **dict(zip(("step_s", "thread_s", "process_s"), took, strict=True)),
        }
        if self._out is None:
            self._out = open(self._path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._out.write(json.dumps(line) + "\n")
        self._rid, self._before = rid, now


def _clocks() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()


# SGLang starts its processes with "spawn", which imports the main module again under this name.
if __name__ in ("__main__", "__mp_main__"):
    from sglang.srt.managers.scheduler import Scheduler

    StepClock(os.environ[STEPS_ENV]).install(Scheduler)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
