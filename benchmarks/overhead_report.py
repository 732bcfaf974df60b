"""What the runs of `bench_overhead` amount to: ratios with intervals, and a table."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import stats

CLOCKS = ("step_s", "thread_s", "process_s")
BASE = "absent"
GOAL = 1.01  # Cake on, and with nothing to give, costs a step less than 1 %
NOISE = 0.97  # nothing that Cake does makes a step this much quicker: the machine was not quiet
Runs = Mapping[str, Sequence[dict[str, Any]]]


def summarise(runs: Runs) -> dict[str, Any]:
    """Per arm: medians per chunk, and ratios to the arm without the plugin.

    Raises: ValueError when an arm's chunks are not those of the others.
    """
    summary: dict[str, Any] = {}
    base = runs[BASE]
    for name, arm in runs.items():
        for run, other in zip(arm, base, strict=True):
            if [s["tokens"] for s in run["steps"]] != [s["tokens"] for s in other["steps"]]:
                raise ValueError(f"{name} computed other chunks than {BASE}")
        columns = list(zip(*(run["steps"] for run in arm), strict=True))
        summary[name] = {
            "ttft_s": stats.spread([run["ttft_s"] for run in arm]),
            "chunk_ms": [_median_ms(column, "step_s") for column in columns],
            "schedule_ms": _median_ms([step for run in arm for step in run["steps"]], "schedule_s"),
        }
        if name != BASE:
            summary[name]["over_absent"] = {
                "ttft": stats.paired_ratio(
                    [[(a["ttft_s"], b["ttft_s"])] for a, b in zip(arm, base, strict=True)]
                ),
                **{clock: _ratio(arm, base, clock) for clock in CLOCKS},
            }
    return summary


def _ratio(
    arm: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], clock: str
) -> dict[str, Any]:
    rounds = [
        [
            (step[clock], other[clock])
            for step, other in zip(run["steps"], baseline["steps"], strict=True)
        ]
        for run, baseline in zip(arm, base, strict=True)
    ]
    return stats.paired_ratio(rounds)


def _median_ms(steps: Sequence[dict[str, Any]], key: str) -> float:
    median_s: float = statistics.median(step[key] for step in steps)
    return round(1e3 * median_s, 3)


def verdict(ratio: Mapping[str, float]) -> str:
    """Whether the goal is met, as far as the interval lets one say."""
    if ratio["low"] < NOISE:
        return "not resolved"
    if ratio["high"] < GOAL:
        return "below 1 %"
    return "above 1 %" if ratio["low"] > GOAL else "not resolved"


def table(result: Mapping[str, Any]) -> str:
    """The readable summary."""
    lines = [""]
    if "summary" in result:
        lines += _steps_table(result["summary"])
        lines += ["", "Cake's own count (/metrics, steps of requests it follows):"]
        for name, histogram in result["step_overhead_seconds"].items():
            lines.append(
                f"  {name:8} {histogram['mean_ms']:8.3f} ms in {histogram['steps']:.0f} steps"
            )
        lines.append("")
    micro = result["decisions"]
    phases = ", ".join(f"{phase} {us:.0f}" for phase, us in micro["median_us"].items())
    total = micro["total_us"]
    lines += [
        f"decisions alone, {micro['prompt_tokens']:,} tokens in {micro['blocks']:,} blocks:",
        f"  {total['median']:.0f} us a step (p99 {total['p99']:.0f}): {phases}",
    ]
    lines += [
        f"{row['waiting']:7,} prompts wait: {row['arrival']:.0f} us an arrival, "
        f"{row['poll']:,.0f} a poll, {row['sort']:,.0f} to sort the queue"
        for row in result["queues_us"]
    ]
    return "\n".join(lines)


def _steps_table(summary: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{'':8} {'TTFT':>8} {'first chunk':>12} {'last chunk':>12} {'planning':>10}   "
        f"{'step, over absent':>24} {'scheduler CPU':>15} {'process CPU':>13}"
    ]
    for name, arm in summary.items():
        # The last whole chunk: a last step of a few tokens says little.
        row = (
            f"{name:8} {arm['ttft_s']['median']:6.2f} s {arm['chunk_ms'][0]:9.1f} ms "
            f"{max(arm['chunk_ms']):9.1f} ms {arm['schedule_ms']:7.2f} ms   "
        )
        if "over_absent" in arm:
            step, thread, process = (arm["over_absent"][clock] for clock in CLOCKS)
            row += (
                f"{step['ratio']:8.4f} [{step['low']:.4f}, {step['high']:.4f}]"
                f"{thread['ratio']:11.4f} {process['ratio']:13.4f}   {verdict(step)}"
            )
        lines.append(row)
    return lines
