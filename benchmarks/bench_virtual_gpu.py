"""A virtual H100 under SGLang's overlap scheduler: times beside T*, stored blocks, launches.

    python -m benchmarks virtual_gpu [--out FILE] [--docs]

The coordinator, the loader, the copies, the costs and the writer are the server's own, in virtual
time (`sglang_cake.testing.virtual_gpu`); the GPU, SGLang's loop and the store are models. So this
says what the decisions and the order of copies are worth, and nothing of a real device. The
numbers are the same on every machine.

`before` in the report was computed with the same model around the data path of commit 6d52732a5948,
which copied a block with one launch for each plane when a step was planned
(`results/virtual-gpu-before.json`).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import documents, facts
from sglang_cake.cli.text_tables import table
from sglang_cake.loading.planner import Mode
from sglang_cake.testing.scheduler_loop import prompt
from sglang_cake.testing.virtual_gpu import MODELS, GpuModel, virtual_scheduler

BEFORE = facts.RESULTS / "virtual-gpu-before.json"
REPORT = facts.REPORTS / "gpu.md"
LINKS_GB_PER_S = (1, 2, 4, 8, 16, 25, 50)
TOKENS = 32768
MODES: tuple[Mode, ...] = ("auto", "compute", "load")


def cold(model: GpuModel) -> dict[str, Any]:
    """A prompt that is not stored, and a store that takes 4 GB/s."""
    with virtual_scheduler(model, link_bytes_per_s=4e9) as scheduler:
        req = prompt(0, TOKENS)
        scheduler.serve([(0.0, req)])
        scheduler.settle()
        stored = len(scheduler.store.keys) / len(scheduler.keys(req.origin_input_ids))
    return {"model": model.name, "stored_share": stored}


def restored(model: GpuModel, link_gb_per_s: float) -> dict[str, Any]:
    """A prompt that is stored, three ways."""
    link = link_gb_per_s * 1e9
    found: dict[str, Any] = {"model": model.name, "link_gb_per_s": link_gb_per_s}
    for mode in MODES:
        with virtual_scheduler(model, link_bytes_per_s=link, mode=mode) as scheduler:
            found[f"{mode}_s"] = scheduler.restore(TOKENS).ttft_s
            if mode == "auto":
                gpu, reads = scheduler.gpu, scheduler.store.read_s
                prompts = 4
                found |= {
                    "launches": gpu.scheduler.launches / prompts,
                    "host_ms": gpu.scheduler.launch_s / prompts * 1e3,
                    "syncs": gpu.scheduler.syncs,
                    "scratch_mib": gpu.peak_scratch_bytes / 2**20,
                    "blocks_loaded": len(reads) / prompts,
                }
    found["ideal_s"] = model.ideal_s(TOKENS, link)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks virtual_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help="one model, one link")
    parser.add_argument("--docs", action="store_true", help="put the table into the report")
    parser.add_argument("--out", type=Path, default=facts.RESULTS / "virtual-gpu.json")
    args = parser.parse_args(argv)
    models = MODELS[:1] if args.small else MODELS
    links = (8,) if args.small else LINKS_GB_PER_S
    result = {
        **facts.header("virtual_gpu", tokens=TOKENS),
        "cold": [cold(model) for model in models],
        "restored": [restored(model, link) for model in models for link in links],
    }
    facts.write(args.out, result)
    before = json.loads(BEFORE.read_text())
    cells = rows(result, before)
    print(table(HEADS, cells, right=range(1, len(HEADS))))
    if args.docs:
        documents.update({"restored": documents.table(HEADS, cells, right=True)}, REPORT)
    return 0


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


def rows(result: dict[str, Any], before: dict[str, Any]) -> list[list[str]]:
    """One for each cell."""
    old = {(cell["model"], cell["link_gb_per_s"]): cell for cell in before["restored"]}
    made = []
    for cell in result["restored"]:
        was = old.get((cell["model"], cell["link_gb_per_s"]))
        made.append(
            [
                f"{cell['model']}, {cell['link_gb_per_s']:g}",
                f"{cell['ideal_s']:.3f}",
                f"{cell['auto_s']:.3f}",
                f"{cell['auto_s'] / cell['ideal_s']:.3f}",
                f"{was['auto_s'] / was['ideal_s']:.2f}" if was else "-",
                f"{cell['auto_s'] / better_s(cell):.2f}",
                f"{was['auto_s'] / better_s(was):.2f}" if was else "-",
                f"{cell['launches']:,.0f}",
                f"{was['launches']:,.0f}" if was else "-",
            ]
        )
    return made


def better_s(cell: dict[str, Any]) -> float:
    """Of the two single ways."""
    return min(float(cell["compute_s"]), float(cell["load_s"]))


if __name__ == "__main__":
    raise SystemExit(main())
