"""What libraries cost where this project has code of its own (docs/libraries.md).

    pip install anyio tenacity stamina simpy opentelemetry-sdk pydantic-settings
    python -m benchmarks libraries [--repeats 7] [--docs]

Arms of a row take turns, round by round, in one process; `start` starts a process for each. An arm
whose library is not installed is left out. `--docs` writes the table of docs/libraries.md.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import documents
from benchmarks.facts import RESULTS, ROOT, header, write
from benchmarks.stats import spread
from sglang_cake.core.threads import DaemonPool, IoThread, run_stoppable
from sglang_cake.simulator.machine import Clock
from sglang_cake.stores.circuit_breaker import TimeoutLimits
from sglang_cake.stores.http.http_transport import Endpoint, HttpTransport

CALLS = 2000  # that are timed together
OWN = "own"

# An arm does `CALLS` operations of its row, and returns the seconds that they took.
Arm = Callable[[], float]


def timed(coroutine_of: Callable[[], Any]) -> float:
    """Seconds of `CALLS` awaits, in a loop of its own."""

    async def main() -> float:
        await coroutine_of()  # threads and imports of the first call
        started_s = time.perf_counter()
        for _ in range(CALLS):
            await coroutine_of()
        return time.perf_counter() - started_s

    return asyncio.run(main())


def thread_calls() -> dict[str, Arm]:
    """A call in a thread, awaited by a coroutine."""
    pool = DaemonPool(1, "bench")
    plain = ThreadPoolExecutor(1)

    def anyio_arm() -> float:
        from anyio import to_thread

        return timed(lambda: to_thread.run_sync(lambda: None))

    return {
        OWN: lambda: timed(lambda: run_stoppable(pool, lambda stop: None)),
        "asyncio.wrap_future": lambda: timed(lambda: asyncio.wrap_future(plain.submit(int))),
        "anyio": anyio_arm,
    }


def loop_calls() -> dict[str, Arm]:
    """A coroutine in a loop of another thread, awaited by a thread."""

    async def nothing() -> None:
        pass

    def own() -> float:
        io = IoThread()
        started_s = time.perf_counter()
        for _ in range(CALLS):
            io.run(nothing(), 10.0)
        took_s = time.perf_counter() - started_s
        io.close()
        return took_s

    def anyio_arm() -> float:
        from anyio.from_thread import start_blocking_portal

        with start_blocking_portal() as portal:
            started_s = time.perf_counter()
            for _ in range(CALLS):
                portal.call(nothing)
            return time.perf_counter() - started_s

    return {OWN: own, "anyio": anyio_arm}


def retried_calls() -> dict[str, Arm]:
    """A request that succeeds at the first try, without the request itself."""

    async def attempt() -> None:
        pass

    def transport() -> HttpTransport:
        return HttpTransport(lambda: Endpoint("http://127.0.0.1:1"), TimeoutLimits())

    async def guarded(http: HttpTransport) -> None:
        async with http.reads.call(1):
            await attempt()

    def own() -> float:
        http = transport()
        return timed(lambda: http.call(http.reads, 1, attempt))

    def tenacity_arm() -> float:
        import tenacity

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_random_exponential(0.1)
        )
        http = transport()
        return timed(lambda: retrying(guarded, http))

    def stamina_arm() -> float:
        import stamina

        caller = stamina.AsyncRetryingCaller(attempts=3).on(OSError)
        http = transport()
        return timed(lambda: caller(guarded, http))

    return {OWN: own, "tenacity": tenacity_arm, "stamina": stamina_arm}


def trace_lines() -> dict[str, Arm]:
    """An event of a request in a file, as JSON."""

    def own() -> float:
        with tempfile.TemporaryFile("w", buffering=1) as file:
            started_s = time.perf_counter()
            for number in range(CALLS):
                event = {"t_s": time.monotonic(), "rid": "r", "event": "fetch", "block": number}
                file.write(json.dumps(event) + "\n")
            return time.perf_counter() - started_s

    def opentelemetry_arm() -> float:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

        with tempfile.TemporaryFile("w", buffering=1) as file:
            provider = TracerProvider(shutdown_on_exit=False)
            exporter = ConsoleSpanExporter(
                out=file, formatter=lambda span: span.to_json(indent=None) + "\n"
            )
            provider.add_span_processor(SimpleSpanProcessor(exporter))
            tracer = provider.get_tracer("cake")
            started_s = time.perf_counter()
            for number in range(CALLS):
                with tracer.start_as_current_span("fetch") as span:
                    span.set_attributes({"rid": "r", "block": number})
            return time.perf_counter() - started_s

    return {OWN: own, "opentelemetry": opentelemetry_arm}


def clock_events() -> dict[str, Arm]:
    """An action at a virtual time, each scheduled by the one before, with 100 others waiting."""

    def own() -> float:
        clock, left = Clock(), CALLS
        for _ in range(100):
            clock.at(1e9, lambda: None)

        def step() -> None:
            nonlocal left
            left -= 1
            if left:
                clock.at(clock.now + 1.0, step)

        clock.at(0.0, step)
        started_s = time.perf_counter()
        clock.run()
        return time.perf_counter() - started_s

    def simpy_arm() -> float:
        import simpy

        env = simpy.Environment()
        for _ in range(100):
            env.timeout(1e9)

        def steps() -> Any:
            for _ in range(CALLS):
                yield env.timeout(1.0)

        env.process(steps())
        started_s = time.perf_counter()
        env.run()
        return time.perf_counter() - started_s

    return {OWN: own, "simpy": simpy_arm}


def starts(own: str, library: str) -> dict[str, Arm]:
    """A process that imports a module, beside one that imports a module of a library too."""

    def arm(modules: str) -> float:
        started_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, cwd=ROOT)
        return time.perf_counter() - started_s

    arms = {OWN: lambda: arm(own)}
    package = library.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        arms[f"with {package}"] = lambda: arm(f"{own}, {library}")
    return arms


ROWS: dict[str, tuple[str, Callable[[], dict[str, Arm]]]] = {
    "call in a thread": ("us", thread_calls),
    "call of the I/O thread": ("us", loop_calls),
    "retried call": ("us", retried_calls),
    "traced event": ("us", trace_lines),
    "event of the simulator": ("us", clock_events),
    "start: settings": ("ms", lambda: starts("sglang_cake.config", "pydantic_settings")),
}


def measure(repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Of each row and arm: time of an operation, in the row's unit."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row, (unit, arms_of) in ROWS.items():
        scale = 1e6 / CALLS if unit == "us" else 1e3
        arms = arms_of()
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            for name, arm in arms.items():
                with contextlib.suppress(ImportError):
                    times[name].append(arm() * scale)
        found[row] = {name: spread(values, digits=2) for name, values in times.items()}
    return found


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """Of each row: our time, and those of libraries."""
    lines = []
    for row, arms in rows.items():
        unit, own = ROWS[row][0], arms[OWN]["median"]
        others = [
            f"{name}: {_figure(arm['median'])} {unit}, {arm['median'] / own:.2g} times"
            for name, arm in arms.items()
            if name != OWN
        ]
        lines.append([row, f"{_figure(own)} {unit}", "; ".join(others)])
    return documents.table(["operation", "ours", "library"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "libraries-cpu.json")
    parser.add_argument("--docs", action="store_true", help="write the table of the docs")
    args = parser.parse_args()
    rows = measure(args.repeats)
    write(args.out, {**header("libraries", repeats=args.repeats), "rows": rows})
    print(table(rows))
    if args.docs:
        documents.update({"libraries": table(rows)}, ROOT / "docs" / "libraries.md")


if __name__ == "__main__":
    main()
