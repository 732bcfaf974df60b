"""What eviction policies keep of traces, and what naming one block costs at a million.

    python -m benchmarks eviction --traces FOLDER [--only replay|parts|pace] [--jobs 2]

FOLDER has the traces of docs/eviction.md. `replay`: every policy at every capacity, hit ratios and
seconds of time to first token saved for two models, beside the offline optimum. `parts`: the
policies with a part left out or a parameter changed. `pace`: microseconds per eviction in a file
store's books with a million blocks. The result is written after every cell, and a run goes on where
one before it stopped: cells that are there are kept, with the commit that each was measured at.
"""

import argparse
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.eviction_cells import BY_SHAPE, CAPACITIES, TRACES, VARIANTS, Cell, run_cell
from benchmarks.facts import RESULTS, header, shown, write
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.simulator.eviction_replay import SHAPES
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.eviction.policy import AccessContext
from sglang_cake.stores.eviction.reuse_policies import ReusePolicy
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.disk import Amount
from sglang_cake.stores.file.evictor import Evictor
from sglang_cake.stores.file.index import BlockIndex, ScannedFile


def replay_cells(traces: list[str], capacities: list[int]) -> Iterator[Cell]:
    for trace in traces:
        for capacity in capacities:
            yield Cell(trace, "belady", capacity, "")
            for policy in POLICIES:
                for shape in SHAPES if policy in BY_SHAPE else [""]:
                    yield Cell(trace, policy, capacity, shape)


def parts_cells(traces: list[str]) -> Iterator[Cell]:
    for trace in traces:
        # A-like's reuse is exponential by construction: it has nothing to say on these.
        for capacity in (1000, 4000, 16000) if trace != "A-like" else ():
            yield from (Cell(trace, name, capacity, "8b") for name in VARIANTS)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    shapes = tuple(row["seconds_saved"])
    return row["trace"], row["policy"], row["capacity"], shapes[0] if len(shapes) == 1 else ""


def asked_for(cells: Iterable[Cell], args: argparse.Namespace) -> list[Cell]:
    """Those that `--policy`, `--shape` and `--capacity` leave."""
    return [
        cell
        for cell in cells
        if (not args.policy or cell.policy in args.policy)
        and (not args.capacity or cell.capacity in args.capacity)
        and (not args.shape or cell.shape in ("", *args.shape))
    ]


def run_cells(
    cells: list[Cell], args: argparse.Namespace, part: str, result: dict[str, Any]
) -> None:
    """Rows that are there already are kept."""
    rows = result.setdefault(part, [])
    done = {key_of(row) for row in rows}
    todo = [c for c in cells if (c.trace, c.policy, c.capacity, c.shape) not in done]
    with ProcessPoolExecutor(args.jobs) as pool:
        tasks = {pool.submit(run_cell, c, args.traces, args.requests): c for c in todo}
        for task in tqdm(as_completed(tasks), total=len(tasks), desc=part, disable=None):
            rows.append({**task.result(), "commit": result["commit"]})
            rows.sort(key=lambda row: (list(TRACES).index(row["trace"]), row["capacity"]))
            write(args.out, result)


def pace(policies: list[str], blocks: int, evictions: int) -> list[dict[str, Any]]:
    """Microseconds per eviction in a store's books: the policy alone, and all but the file.

    Every policy in turn names and strikes out blocks of the same books. A block in eight has been
    read since it was put; they belong to 16 classes, and to prompts of 1 to 997 blocks.
    """
    digest, size, rows = Digest(bytes(32)), 1 << 20, []
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / "made"
        made.mkdir()
        index = BlockIndex(made / "index.db")
        index.add_found(digest, 0, (found(n, size) for n in range(blocks)))
        index.close()
        with closing(sqlite3.connect(made / "index.db")) as books, books:
            books.execute(
                "UPDATE blocks SET workload = 'w' || (id / 8 % 2), turn = 1 + id / 16 % 4, "
                "uses = (id - 1) % 8 = 0, position = id % 50, reach = 1 + id * 7919 % 997"
            )
        for policy in policies:
            root = Path(name) / policy
            shutil.copytree(made, root)
            index = BlockIndex(root / "index.db")
            room = Evictor(FolderSettings(root, policy=policy), forget)
            room.restart(index, leads=True)
            began_s = time.perf_counter()
            while not room.learn(index, rest=lambda seconds: False):
                pass
            learn_s = time.perf_counter() - began_s
            order = room._policy
            queues = len(order.class_queues) if isinstance(order, ReusePolicy) else 1
            began_s = time.perf_counter()
            left_bytes = evictions * size
            while left_bytes > 0 and (freed := room.free(index, Amount(left_bytes))):  # in steps
                left_bytes -= freed.bytes
            make_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            for turn in range(evictions):
                order.pop(2e9 + turn)  # a new time each: nothing is used again
            pop_s = time.perf_counter() - began_s
            index.close()
            shutil.rmtree(root)
            rows.append(
                {
                    "policy": policy,
                    "blocks": blocks,
                    "lanes": queues,
                    "learn_s": round(learn_s, 2),
                    "us_per_eviction_policy": round(1e6 * pop_s / evictions, 2),
                    "us_per_eviction_store": round(1e6 * make_s / evictions, 2),
                }
            )
    return rows


def forget(ident: int, context: AccessContext) -> None:
    pass


def found(number: int, size: int) -> ScannedFile:
    key = BlockKey(number.to_bytes(8, "big") * 4)
    used_s = 1e9 + number + (500_000 if number % 8 == 0 else 0)
    return ScannedFile(key, size, 1e9 + number, used_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, help="folder of the traces")
    parser.add_argument("--trace", choices=TRACES, action="append", help="only this one")
    parser.add_argument("--policy", action="append", help="only this one, or this variant")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only costs of this one")
    parser.add_argument("--capacity", type=int, action="append", help="only this one")
    parser.add_argument("--only", choices=("replay", "parts", "pace"), action="append")
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--requests", type=int, default=0, help="only the first N of a trace")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of `pace` (%(default)s)")
    parser.add_argument("--evictions", type=int, default=5000, help="of `pace` (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "eviction.json")
    args = parser.parse_args()
    only, traces = args.only or ["replay", "parts", "pace"], args.trace or list(TRACES)
    if args.traces is None and only != ["pace"]:
        parser.error("--traces: name the folder that has the traces (docs/eviction.md)")
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    result = {**result, **header("eviction", requests=args.requests)}
    if "pace" in only:
        result["pace"] = pace(args.policy or list(POLICIES), args.blocks, args.evictions)
        write(args.out, result)
    if "replay" in only:
        run_cells(asked_for(replay_cells(traces, list(CAPACITIES)), args), args, "replay", result)
    if "parts" in only:
        run_cells(asked_for(parts_cells(traces), args), args, "parts", result)
    print(f"written: {shown(args.out)}")


if __name__ == "__main__":
    main()
