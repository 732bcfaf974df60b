"""A virtual H100 under SGLang's overlap scheduler: times beside T*, stored blocks, launches.

    python -m benchmarks virtual_gpu [--out FILE] [--docs]

The coordinator, the loader, the copies, the costs and the writer are the server's own, in virtual
time (`sglang_cake.testing.virtual_gpu`); the GPU, SGLang's loop and the store are models. So this
says what the decisions and the order of copies are worth, and nothing of a real device. The
numbers are the same on every machine.

`before` is the same server with each fault of its former data path brought back
(`former_path.py`).
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import documents, facts
from benchmarks.command_line import parser_of
from benchmarks.former_path import former_path
from sglang_cake.cli.text_tables import table
from sglang_cake.loading import loader
from sglang_cake.loading.cost_model import StepWork, work_of
from sglang_cake.loading.planner import Mode
from sglang_cake.simulator.hardware import PLAN_S
from sglang_cake.testing.scheduler_loop import prompt
from sglang_cake.testing.virtual_gpu import (
    BLOCK_TOKENS,
    EVENT_S,
    LAUNCH_S,
    MODELS,
    GpuModel,
    VirtualGpu,
    virtual_scheduler,
)
from sglang_cake.testing.virtual_time import virtual_time

REPORT = facts.REPORTS / "gpu.md"
LINKS_GB_PER_S = (1, 2, 4, 8, 16, 25, 50)
STORING_GB_PER_S = (0.25, 0.5, 1, 2, 4)
COLD_GB_PER_S = 4  # of the store in the table of goals
DECODES = 64
DECODE_GB_PER_S = 25
PAGE_TOKENS = 64  # beside decodes, where freeing slots could wait for the device
GOAL_GB_PER_S = range(2, 26)
TOKENS = 32768
SHORT_TOKENS = 16384
PROMPTS_BEFORE = 3
BUSES_GB_PER_S = (25, 50)  # PCIe 4 and 5
HICACHE_LAUNCHES = 4  # that prepare the slots of a load
MEMORY_GB_PER_S = 20  # of copies within host memory by the store's threads: an assumption
MODES: tuple[Mode, ...] = ("auto", "compute", "load")


def cold(model: GpuModel, link_gb_per_s: float, tokens: int = TOKENS) -> dict[str, Any]:
    """A prompt that is not stored, and a store that takes so much."""
    with virtual_scheduler(model, link_bytes_per_s=link_gb_per_s * 1e9) as scheduler:
        req = prompt(0, tokens)
        scheduler.serve([(0.0, req)])
        scheduler.settle()
        stored = len(scheduler.store.keys) / len(scheduler.keys(req.origin_input_ids))
        syncs = scheduler.gpu.scheduler.syncs
    cell = {"model": model.name, "link_gb_per_s": link_gb_per_s, "tokens": tokens}
    return cell | {"stored_share": stored, "syncs": syncs}


def beside_decodes(model: GpuModel, tokens: int) -> dict[str, Any]:
    """A prompt that is loaded beside requests that decode, with pages of several tokens."""
    with virtual_scheduler(
        model,
        link_bytes_per_s=DECODE_GB_PER_S * 1e9,
        mode="load",
        decodes=DECODES,
        page_tokens=PAGE_TOKENS,
    ) as scheduler:
        scheduler.restore(tokens, prompts_before=0)
        ends_s = [end_s for _, end_s in scheduler.gpu.forwards[:-1]]  # the last one prefills
        slowest_s = max(stop_s - start_s for start_s, stop_s in itertools.pairwise(ends_s))
        syncs = scheduler.gpu.scheduler.syncs
    late_s = slowest_s - model.prefill.work_s(StepWork(decodes=DECODES))
    return {"model": model.name, "tokens": tokens, "late_ms": late_s * 1e3, "syncs": syncs}


def restored(model: GpuModel, link_gb_per_s: float, tokens: int) -> dict[str, Any]:
    """A prompt that is stored, three ways, after others of its kind."""
    link = link_gb_per_s * 1e9
    found: dict[str, Any] = {
        "model": model.name,
        "link_gb_per_s": link_gb_per_s,
        "tokens": tokens,
        "ideal_s": model.ideal_s(tokens, link),
    }
    for mode in MODES:
        with virtual_scheduler(model, link_bytes_per_s=link, mode=mode) as scheduler:
            scheduler.restore(tokens, prompts_before=PROMPTS_BEFORE - 1)
            before, reads = scheduler.polls, len(scheduler.store.read_s)
            gpu = scheduler.gpu
            host_s = gpu.copier.launch_s + gpu.scheduler.launch_s
            found[f"{mode}_s"] = scheduler.restore(tokens, prompts_before=0).ttft_s
            if mode == "auto":
                launches = scheduler.poll_launches[before:]
                blocks = len(scheduler.store.read_s) - reads
                host_s = gpu.copier.launch_s + gpu.scheduler.launch_s - host_s
                found |= {
                    "launches": sum(launches),
                    "poll_launches": max(launches),
                    "block_us": host_s / max(1, blocks) * 1e6,
                    "loaded_gb_per_s": scheduler.loaded_bytes_per_s(reads) / 1e9
                    if blocks > 1
                    else 0.0,
                    "blocks_loaded": blocks,
                    "syncs": gpu.scheduler.syncs,
                    "copier_waits": gpu.scheduler.waits,
                    "copier_wait_ms": gpu.scheduler.wait_s * 1e3,
                    "scratch_mib": gpu.peak_scratch_bytes / 2**20,
                }
    return found


def in_memory(model: GpuModel, bus_gb_per_s: float, tokens: int) -> dict[str, Any]:
    """A prompt in a tier in memory: lent to the copies, and copied into staging before; HiCache's
    host tier; and what copies by layer would give (the server copies by block)."""
    bus = bus_gb_per_s * 1e9
    found: dict[str, Any] = {
        "model": model.name,
        "bus_gb_per_s": bus_gb_per_s,
        "tokens": tokens,
        "ideal_s": model.ideal_s(tokens, bus),
        "hicache_s": hicache_s(model, bus, tokens),
    }
    ahead_s = loader.LENT_AHEAD_S
    for name, lends, by_layer, lent_ahead_s in (
        ("lent_s", True, False, ahead_s),
        ("copied_s", False, False, ahead_s),
        ("by_layer_s", True, True, ahead_s),
        ("all_by_layer_s", True, True, math.inf),
    ):
        with (
            patch.object(loader, "LENT_AHEAD_S", lent_ahead_s),
            virtual_scheduler(
                model,
                link_bytes_per_s=MEMORY_GB_PER_S * 1e9,
                dma_bytes_per_s=bus,
                lends=lends,
                by_layer=by_layer,
            ) as scheduler,
        ):
            found[name] = scheduler.restore(tokens).ttft_s
    return found


def hicache_s(model: GpuModel, bus_bytes_per_s: float, tokens: int) -> float:
    """Of SGLang's HiCache, which loads all before it computes the last token, on the same device.

    Its scheduler thread launches the copies of all layers, each with an event, and then the
    forward, which waits for each layer (`L2TransferEngine.submit_host_to_device`). The layers cross
    the bus without a gap, and nothing is counted for their kernels on the device.
    """
    with virtual_time() as io:
        gpu, begun_s = VirtualGpu(io, model.layers), io.now_s
        io.until(begun_s + PLAN_S)
        gpu.launch(HICACHE_LAUNCHES, HICACHE_LAUNCHES * LAUNCH_S)
        load_s = tokens // BLOCK_TOKENS * model.layout.block_bytes / bus_bytes_per_s
        loaded_s = gpu.to_device.run(io.now_s + LAUNCH_S, load_s)
        gpu.launch(model.layers, model.layers * (LAUNCH_S + EVENT_S))
        gpu.follow(loaded_s)
        return gpu.forward(model.prefill.work_s(work_of(tokens - 1, tokens))) - begun_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    parser = parser_of("bench_virtual_gpu", __doc__)
    parser.add_argument("--small", action="store_true", help="one model, one link")
    parser.add_argument("--docs", action="store_true", help="put the table into the report")
    parser.add_argument("--out", type=Path, default=facts.RESULTS / "virtual-gpu.json")
    args = parser.parse_args(argv)
    models = MODELS[:1] if args.small else MODELS
    links = (8,) if args.small else LINKS_GB_PER_S
    rates = STORING_GB_PER_S[-1:] if args.small else STORING_GB_PER_S
    lengths = (TOKENS,) if args.small else (TOKENS, SHORT_TOKENS)

    def path() -> dict[str, Any]:
        each = list(itertools.product(lengths, models))
        return {
            "restored": [restored(m, link, tokens) for tokens, m in each for link in links],
            "stored": [cold(model, COLD_GB_PER_S, tokens) for tokens, model in each],
            "beside_decodes": [beside_decodes(model, tokens) for tokens, model in each],
        }

    with former_path():
        before = path()
    result = {
        **facts.header("virtual_gpu", tokens=TOKENS),
        "before": before,
        **path(),
        "cold": [cold(model, rate) for model in models for rate in rates],
        "in_memory": [
            in_memory(model, bus, tokens)
            for tokens in lengths
            for model in models
            for bus in BUSES_GB_PER_S
        ],
    }
    facts.write(args.out, result)
    texts = {}
    for name, (heads, cells) in tables(result).items():
        print(table(heads, cells, right=range(1, len(heads))), end="\n\n")
        texts[name] = documents.table(heads, cells, right=True)
    if args.docs:
        documents.update(texts, REPORT)
    return 0


Table = tuple[list[str], list[list[str]]]


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Heads and rows of each table of the report."""
    long, short = (
        [cell for cell in result["restored"] if cell["tokens"] == tokens]
        for tokens in (TOKENS, SHORT_TOKENS)
    )
    return {
        "goals": goal_table(result),
        "restored": (HEADS, rows(long, result["before"])),
        "shorter": (SHORT_HEADS, [short_row(cell) for cell in short]),
        "path": (PATH_HEADS, [path_row(cell) for cell in long]),
        "cold": cold_table(result["cold"]),
        "memory": (MEMORY_HEADS, [memory_row(cell) for cell in result["in_memory"]]),
    }


ID = ("model", "link_gb_per_s", "tokens")
HEADS = [
    "model, link GB/s",
    "T* s",
    "auto s",
    "T/T*",
    "before",
    "of the better way",
    "before",
    "launches",
    "before",
]
SHORT_HEADS = [*HEADS[:4], HEADS[5]]
PATH_HEADS = [
    "model, link GB/s",
    "loaded, of the link",
    "launches in one iteration, at most",
    "host time of a block, us",
    "waits for the device",
    "waits for the copier",
    "their ms",
    "device memory, MiB",
]


MEMORY_HEADS = [
    "model, PCIe GB/s, tokens",
    "T* s",
    "lent s",
    "T/T*",
    "copied s",
    "HiCache s",
    "lent to HiCache",
    "by layer",
    "all by layer",
]


def memory_row(cell: dict[str, Any]) -> list[str]:
    """Times of one cell."""
    return [
        f"{cell['model']}, {cell['bus_gb_per_s']:g}, {cell['tokens']:,}",
        f"{cell['ideal_s']:.3f}",
        f"{cell['lent_s']:.3f}",
        f"{cell['lent_s'] / cell['ideal_s']:.3f}",
        f"{cell['copied_s']:.3f}",
        f"{cell['hicache_s']:.3f}",
        *(
            f"{cell[name] / cell['hicache_s']:.2f}"
            for name in ("lent_s", "by_layer_s", "all_by_layer_s")
        ),
    ]


def short_row(cell: dict[str, Any]) -> list[str]:
    """Times of one cell."""
    return [
        name_of(cell),
        f"{cell['ideal_s']:.3f}",
        f"{cell['auto_s']:.3f}",
        f"{cell['auto_s'] / cell['ideal_s']:.3f}",
        f"{cell['auto_s'] / better_s(cell):.2f}",
    ]


def path_row(cell: dict[str, Any]) -> list[str]:
    """What the copies of one cell take."""
    return [
        name_of(cell),
        f"{cell['loaded_gb_per_s'] / cell['link_gb_per_s']:.2f}",
        f"{cell['poll_launches']}",
        f"{cell['block_us']:.0f}",
        f"{cell['syncs']}",
        f"{cell['copier_waits']}",
        f"{cell['copier_wait_ms']:.2f}",
        f"{cell['scratch_mib']:.0f}",
    ]


def whole_percent(share: float) -> str:
    """Rounded down: 100 % is all."""
    return f"{math.floor(100 * share)}%"


Cells = list[dict[str, Any]]

# What is measured, the goal, the part of the result, the number of its cells, and how it is shown.
GOALS: tuple[tuple[str, str, str, Callable[[Cells], float], Callable[[float], str]], ...] = (
    (
        "blocks of a cold prompt that are stored",
        "100%",
        "stored",
        lambda cells: cells[0]["stored_share"],
        whole_percent,
    ),
    (
        "loaded beside forwards, of the link, at least",
        "0.9",
        "restored",
        lambda cells: min(cell["loaded_gb_per_s"] / cell["link_gb_per_s"] for cell in cells),
        "{:.2f}".format,
    ),
    (
        "T/T*, median",
        "1.05",
        "restored",
        lambda cells: statistics.median(cell["auto_s"] / cell["ideal_s"] for cell in cells),
        "{:.2f}".format,
    ),
    (
        "of the better single way, at most",
        "1.02",
        "restored",
        lambda cells: max(cell["auto_s"] / better_s(cell) for cell in cells),
        "{:.2f}".format,
    ),
    (
        "launches in one iteration, at most",
        "the same for any number of blocks",
        "restored",
        lambda cells: max(cell["poll_launches"] for cell in cells),
        "{:,}".format,
    ),
    (
        "host time of a block, us, at most",
        "60",
        "restored",
        lambda cells: max(cell["block_us"] for cell in cells),
        "{:,.0f}".format,
    ),
    (
        "waits for the device",
        "0",
        "syncs",
        lambda cells: sum(cell["syncs"] for cell in cells),
        "{:,}".format,
    ),
    (
        "device memory, MiB, at most",
        "128",
        "restored",
        lambda cells: max(cell["scratch_mib"] for cell in cells),
        "{:,.0f}".format,
    ),
    (
        "a decode step is later by, ms, at most",
        "kernels alone",
        "beside_decodes",
        lambda cells: cells[0]["late_ms"],
        "{:.2f}".format,
    ),
)


def goal_table(result: dict[str, Any]) -> Table:
    """One row for each goal: before and after for each model and length."""
    which = [(cell["model"], cell["tokens"]) for cell in result["stored"]]

    def chosen(path: dict[str, Any], part: str, model: str, tokens: int) -> Cells:
        parts = ("stored", "restored", "beside_decodes") if part == "syncs" else (part,)
        return [
            cell
            for cell in itertools.chain.from_iterable(path[each] for each in parts)
            if (cell["model"], cell["tokens"]) == (model, tokens)
            and (part != "restored" or cell["link_gb_per_s"] in GOAL_GB_PER_S)
        ]

    made = []
    for what, goal, part, number, show in GOALS:
        pairs = (
            [show(number(chosen(path, part, *each))) for path in (result["before"], result)]
            for each in which
        )
        made.append([what, goal, *(f"{before} → {now}" for before, now in pairs)])
    return ["", "goal", *(f"{model}, {tokens:,}" for model, tokens in which)], made


def cold_table(cells: list[dict[str, Any]]) -> Table:
    """One row for each model."""
    rates = sorted({cell["link_gb_per_s"] for cell in cells})
    shares = {(cell["model"], cell["link_gb_per_s"]): cell["stored_share"] for cell in cells}
    names = list(dict.fromkeys(cell["model"] for cell in cells))
    return ["model", *(f"{rate:g} GB/s" for rate in rates)], [
        [name, *(whole_percent(shares[name, rate]) for rate in rates)] for name in names
    ]


def name_of(cell: dict[str, Any]) -> str:
    """The first column."""
    return f"{cell['model']}, {cell['link_gb_per_s']:g}"


def rows(cells: list[dict[str, Any]], before: dict[str, Any]) -> list[list[str]]:
    """One for each cell."""
    old = {tuple(map(cell.get, ID)): cell for cell in before["restored"]}
    made = []
    for cell in cells:
        was = old[tuple(map(cell.get, ID))]
        made.append(
            [
                name_of(cell),
                f"{cell['ideal_s']:.3f}",
                f"{cell['auto_s']:.3f}",
                f"{cell['auto_s'] / cell['ideal_s']:.3f}",
                f"{was['auto_s'] / was['ideal_s']:.2f}",
                f"{cell['auto_s'] / better_s(cell):.2f}",
                f"{was['auto_s'] / better_s(was):.2f}",
                f"{cell['launches']:,.0f}",
                f"{was['launches']:,.0f}",
            ]
        )
    return made


def better_s(cell: dict[str, Any]) -> float:
    """Of the two single ways."""
    return min(float(cell["compute_s"]), float(cell["load_s"]))


if __name__ == "__main__":
    raise SystemExit(main())
