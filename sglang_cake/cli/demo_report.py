"""The results of the demo: numbers, a table and the picture."""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sglang_cake.cli.plots import plot_meet
from sglang_cake.demo.event_trace import RequestTrace, read_event_trace
from sglang_cake.demo.sglang_server import Reply
from sglang_cake.simulator.ideal_ttft import Ideal, ideal_meet

# Equal runs on a quiet machine differ by a few percent. With a larger spread the arms, which run
# one after the other, cannot be compared.
QUIET_SPREAD = 1.15


class DemoFailed(RuntimeError):
    """The demo cannot go on; the message says why."""


@dataclass(slots=True)
class Arm:
    """Runs of the prompt in one mode of the server."""

    mode: str
    trace_file: Path
    replies: list[Reply] = field(default_factory=list)

    @property
    def ttft_s(self) -> list[float]:
        """Times of all runs, in order."""
        return [reply.ttft_s for reply in self.replies]

    @property
    def typical(self) -> Reply:
        """The run with the (low) median time to first token."""
        median = statistics.median_low(self.ttft_s)
        return next(reply for reply in self.replies if reply.ttft_s == median)

    @property
    def trace(self) -> RequestTrace:
        reply = self.typical
        return read_event_trace(self.trace_file, reply.meta["id"], reply.first_token_s)


class Arms(NamedTuple):
    """The three ways to get the prompt's KV."""

    compute: Arm
    load: Arm
    both: Arm


def ideal_of(arms: Arms) -> Ideal:
    """The ideal from measured times: of chunks in the arm `compute`, of blocks in the arm `load`.

    The last step is the one after the last loaded block. The fixed cost is the time from sending
    the request to its first step. Both are part of every measured time.

    Raises: DemoFailed if nothing was loaded.
    """
    computed, loaded = arms.compute.trace, arms.load.trace
    if not loaded.loads or not loaded.steps or not computed.steps:
        raise DemoFailed(
            "nothing was loaded: the store lost what the first server had put into it, as a store "
            "in the server's own memory does"
        )
    load_s = loaded.loads[-1].land_s - loaded.found_s
    last = loaded.steps[-1]
    return ideal_meet(
        [(step.stop - step.start, step.end_s - step.begin_s) for step in computed.steps],
        loaded.stored_tokens,
        load_s / (len(loaded.loads) * loaded.block_tokens),
        last_step_s=last.end_s - last.begin_s,
        fixed_s=computed.steps[0].begin_s - arms.compute.typical.sent_s,
    )


def evaluate(
    arms: Arms, cold: Reply | None = None, *, bandwidth: float, prompt_bytes: int
) -> dict[str, Any]:
    """All numbers of the demo; medians over the runs of each arm.

    Args:
        cold: one more answer that must be the same.
        bandwidth: bytes per second of the link; infinite: no limit, which is None in the result.

    Raises: DemoFailed.
    """
    ttft_s = {arm.mode: statistics.median(arm.ttft_s) for arm in arms}
    ideal = ideal_of(arms)
    replies = [reply for arm in arms for reply in arm.replies]
    replies += [] if cold is None else [cold]
    outputs = {tuple(reply.output_ids) for reply in replies}
    exact = arms.compute.replies[0].output_ids
    trace = arms.load.trace
    stored_bytes = prompt_bytes * trace.stored_tokens // trace.prompt_tokens
    return {
        "ttft_s": ttft_s,
        "ideal_s": ideal.ttft_s,
        "ideal_meet_token": round(ideal.meet_token),
        "over_ideal": ttft_s["both"] / ideal.ttft_s,
        "speedup": {arm: ttft_s[arm] / ttft_s["both"] for arm in ("compute", "load")},
        "same_tokens": len(outputs) == 1,
        "new_tokens": len(exact),
        "agreed_tokens": min(_agreed(exact, output) for output in outputs),
        # As the servers report it: `auto` may have a bound from the environment.
        "lossy": any(reply.cake.get("lossy_tokens") for reply in replies),
        "prompt_tokens": trace.prompt_tokens,
        "stored_tokens": trace.stored_tokens,
        "computed_tokens": arms.both.typical.cake["computed_tokens"],
        "loaded_tokens": arms.both.typical.cake["loaded_tokens"],
        "bandwidth_bytes_per_s": round(bandwidth) if math.isfinite(bandwidth) else None,
        "link_limit_s": stored_bytes / bandwidth,
        "spread": max(max(arm.ttft_s) / min(arm.ttft_s) for arm in arms),
    }


def table(arms: Arms, result: dict[str, Any]) -> str:
    names = {"compute": "compute only", "load": "load only", "both": "both at once"}
    lines = ["", f"{'time to first token':22}{'median':>9}{'min':>9}{'max':>9}   both is"]
    for arm in arms:
        times = (result["ttft_s"][arm.mode], min(arm.ttft_s), max(arm.ttft_s))
        row = f"  {names[arm.mode]:20}" + "".join(f"{time:7.2f} s" for time in times)
        if arm.mode in result["speedup"]:
            row += f"   {result['speedup'][arm.mode]:.2f}x faster"
        lines.append(row)
    lines += [
        f"  {'ideal':20}{result['ideal_s']:7.2f} s{'':18}   {result['over_ideal']:.3f}x this",
        "",
        f"both at once: {result['computed_tokens']:,} tokens computed, "
        f"{result['loaded_tokens']:,} loaded; ideally they meet at token "
        f"{result['ideal_meet_token']:,}",
        f"link: {result['bandwidth_bytes_per_s'] / 1e6:.2f} MB/s; the {result['stored_tokens']:,} "
        f"stored tokens cannot pass it in less than {result['link_limit_s']:.2f} s",
        f"output tokens: {_sameness(result)}",
    ]
    if result["spread"] > QUIET_SPREAD or result["over_ideal"] < 1 / QUIET_SPREAD:
        lines.append(
            f"CAUTION: the machine was busy, equal runs differ by up to {result['spread']:.2f}x; "
            "compare again on a quiet one"
        )
    return "\n".join(lines)


def _sameness(result: dict[str, Any]) -> str:
    if result["same_tokens"]:
        return "the same in every run"
    if result["lossy"]:
        return (
            f"not the same, as may be with a lossy codec: the first {result['agreed_tokens']} of "
            f"{result['new_tokens']} are"
        )
    return "NOT THE SAME: this is a bug"


def _agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same before the first that differs. Later tokens follow different
    text, so they are not compared."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def report(arms: Arms, result: dict[str, Any], out: Path, say: Callable[[str], None]) -> None:
    """Print the table and the result, and write the picture and `result.json` into the folder
    `out`. Without matplotlib there is no picture."""
    print(table(arms, result), end="\n\n")
    try:
        pictures = draw(arms, result, out / "meet")
    except ImportError:
        say("no picture, which needs matplotlib: pip install matplotlib")
    else:
        for path in pictures:
            say(f"picture: {path}")
        result["picture"] = str(pictures[-1])
    line = json.dumps(result)
    (out / "result.json").write_text(line + "\n")
    print(line)


def draw(arms: Arms, result: dict[str, Any], out: Path) -> list[Path]:
    """The picture of the typical run of `both`, with the other two arms behind it."""
    title = (
        f"{result['prompt_tokens']:,}-token prompt: first token "
        f"{result['speedup']['compute']:.2f}x sooner than by computing, "
        f"{result['speedup']['load']:.2f}x sooner than by loading"
    )
    compute, load, both = (arm.trace for arm in arms)
    return plot_meet(both, compute, load, title, out)
