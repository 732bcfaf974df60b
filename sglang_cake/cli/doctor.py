"""`sglang-cake doctor`: whether a server with these flags will work on this machine.

It takes the flags of `sglang serve`, as if `--enable-cake` were among them, and says what is fine
and what to mend. It starts no server and downloads nothing; of the model, its config.json is
enough. It writes some blocks into each store that has room for them, reads them, and deletes them.

    sglang-cake doctor --model-path ./my-model --cake-store "file:///nvme/kv?capacity=500GB"

Exit status: 0 if all is fine, 1 if there is something to mend, 2 for wrong flags.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from packaging.specifiers import SpecifierSet

from sglang_cake.cli import plan
from sglang_cake.cli.named_stores import FullStore, NamedStore, progress, run_tool
from sglang_cake.cli.patch import PatchState, find_installation, plan_of
from sglang_cake.cli.store_bench import measure_size
from sglang_cake.cli.text_tables import count_text, exact_size_text, size_text
from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import available_bytes, buffer_counts, mib, pin_advice
from sglang_cake.core.errors import ConfigError, PatchError, StoreError
from sglang_cake.core.threads import run_in_own_thread
from sglang_cake.simulator.hardware import GPUS
from sglang_cake.simulator.shapes import Shape, find_shape
from sglang_cake.stores.file.disk import free_bytes
from sglang_cake.stores.open_store import depths_of, parse_sources
from sglang_cake.stores.url import redacted, split_urls

if TYPE_CHECKING:
    from sglang_cake.integration.server_check import ResolvedServer

BENCH_BYTES = 64 << 20
BENCH_S = 30.0
HANG_S = 30.0  # after that, for what cannot be cancelled
LARGEST_BLOCK_BYTES = 64 << 20  # that is measured
UNKNOWN_BLOCK_BYTES = 1 << 20  # measured if the model is not known
NO_LIMIT = 2**40

FindingState = Literal["ok", "mend", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the page.

    Attributes:
        state: `mend`: cake will not work, or not as it should, until that is mended; `note`: was
            not checked, or is worth knowing.
        about: one or two words.
        text: one line; with `mend`, it says what to do.
    """

    state: FindingState
    about: str
    text: str


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="whether a server with these flags will work here, and what to mend",
        usage="sglang-cake doctor [--json] [flags of sglang serve]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run_tool(_doctor))


async def _doctor(args: argparse.Namespace) -> int:
    # SGLang asks a model hub, and logs, unless it is told before it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    modelscope = os.environ.pop("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true")
    logging.basicConfig(level=logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = await findings(args.server_flags, modelscope=modelscope)
    mend = [each for each in found if each.state == "mend"]
    if args.json:
        print(json.dumps({"fine": not mend, "lines": [asdict(each) for each in found]}))
    else:
        width = max(len(each.about) for each in found)
        for each in found:
            print(f"{each.state:<4}  {each.about:<{width}}  {each.text}")
        print(f"\n{len(mend)} to mend" if mend else "\nnothing to mend")
    return 1 if mend else 0


async def findings(argv: Sequence[str], *, modelscope: bool) -> list[Finding]:
    """All lines of the page, for the flags of a server.

    Args: modelscope: whether the server takes models from ModelScope.

    Raises: ConfigError for a wrong value; SystemExit for a wrong flag, after SGLang's usage.
    """
    found: list[Finding] = []
    try:
        from sglang_cake.integration import compat

        found += [version_finding(compat.INSTALLED, compat.differences(), compat.CHECKED)]
        from sglang_cake.integration import server_check
    except (ImportError, OSError) as error:
        return [*found, _no_sglang(error)]
    record, config = server_check.read_command_line(argv)
    fault = server_check.plugin_fault()
    found.append(Finding("mend", "plug-in", fault) if fault else _ok("plug-in", "is loaded"))
    faults = server_check.setting_faults(record, config)
    found += [Finding("mend", "settings", fault) for fault in faults]
    if not faults:
        found.append(_ok("settings", f"supported; codec {config.codec}"))

    server = shape = None
    file = server_check.config_file(record)
    try:
        if file is None:
            elsewhere = server_check.config_elsewhere(record, modelscope=modelscope)
            found.append(_no_config(record.model_path, elsewhere))
        else:
            server = server_check.resolve(record, config)
            found.append(_ok("model", server.kinds))
            shape = find_shape(str(file))
            if shape.unmodelled is not None:
                text = f"{shape.unmodelled}: memory, tokens and gain are not predicted"
                found.append(Finding("note", "model", text))
                shape = None
    except ConfigError as error:
        if str(error) in faults:
            found.append(Finding("note", "model", "was not checked: settings are refused"))
        else:
            found.append(Finding("mend" if server is None else "note", "model", str(error)))
    gpus = server_check.gpus()
    if server is not None:
        found.append(device_finding(server.device, server.ranks, gpus))
        if server.device == "cpu":
            found.append(_repairs())
    kv = None
    stores = stores_of(config)
    if server is not None and shape is not None:
        kv = KvSizes.of(server, shape, config.block_tokens_in(server.page_tokens))
        can_pin = server_check.can_pin if server.device == "cuda" else None
        reads = sum(depths_of([store.source for store in stores], config.queue_depth))
        found.append(
            memory_finding(server, kv, config, available_bytes(), reads=reads, can_pin=can_pin)
        )
    speeds = []
    for store in stores:
        [depth] = depths_of([store.source], config.queue_depth)
        lines, bytes_per_s = await store_findings(store, depth, kv)
        found += lines
        speeds += [] if bytes_per_s is None else [bytes_per_s]
    if server is not None and shape is not None and speeds:
        gpu = None
        if server.device == "cuda" and gpus:
            gpu = (gpus[0], server_check.gpu_memory_bytes())
        block_tokens = config.block_tokens_in(server.page_tokens)
        found += gain_findings(str(file), server, block_tokens, gpu, speeds)
    return found


def _ok(about: str, text: str) -> Finding:
    return Finding("ok", about, text)


# ---- SGLang ----


def version_finding(version: str, differences: Sequence[str], checked: SpecifierSet) -> Finding:
    """Args: checked: the versions that the test suite ran with."""
    if differences:
        first = "; ".join(differences[:3]) + ("; ..." if len(differences) > 3 else "")
        text = f"{version} differs in {len(differences)} places that cake uses: {first}"
        return Finding("mend", "SGLang", f"{text}: install sglang{checked}")
    if version not in checked:
        text = f"{version} has all names that cake uses, but was never tested: see {checked}"
        return Finding("note", "SGLang", text)
    return _ok("SGLang", f"{version}, with all names that cake uses")


def _no_sglang(error: ImportError | OSError) -> Finding:
    if isinstance(error, OSError) and error.filename is not None:  # it makes its cache folder
        text = f"cannot be imported ({error}): set HOME or SGLANG_CACHE_DIR to a folder that this "
        text += "user can write"
    elif isinstance(error, ImportError) and error.name == "sglang":
        text = "is not installed in this environment: install it, then sglang-cake beside it"
    else:
        text = f"cannot be imported ({error}): without a GPU, run `sglang-cake patch apply`"
    return Finding("mend", "SGLang", text)


def _no_config(model: str, elsewhere: str | None) -> Finding:
    if elsewhere is None:
        text = f"there is no config.json of {model} on this machine: download the model, or name a "
        return Finding("mend", "model", text + "folder that has one")
    text = f"was not checked: SGLang reads the configuration of {model} from {elsewhere}. Memory, "
    return Finding("note", "model", text + "tokens and gain are not predicted")


def _repairs() -> Finding:
    try:
        states = plan_of(find_installation()).states
    except PatchError as error:
        return Finding("note", "repairs", f"for CPUs: {error}")
    missing = [name for name, state in states.items() if state is not PatchState.APPLIED]
    if missing:
        text = f"for CPUs not applied: {', '.join(missing)}: run `sglang-cake patch apply`"
        return Finding("mend", "repairs", text)
    return _ok("repairs", f"for CPUs: all {len(states)} are applied")


# ---- the machine ----


@dataclass(frozen=True, slots=True)
class KvSizes:
    """The sizes of a model's KV on a server.

    Attributes:
        block_bytes: of a block of one rank.
        end_blocks: blocks of an end state; 0: the model has none.
        stored_token_bytes: of one token in a store, over all ranks.
    """

    block_bytes: int
    end_blocks: int
    stored_token_bytes: int

    @classmethod
    def of(cls, server: "ResolvedServer", shape: Shape, block_tokens: int) -> "KvSizes":
        tp_size, value_bytes = server.tp_size, server.kv_value_bytes
        return cls(  # a shape counts 2 bytes for each value
            int(block_tokens * shape.rank_kv_bytes(tp_size) * value_bytes / 2),
            shape.end_blocks(tp_size, block_tokens, smaller=2 / value_bytes),
            int(shape.stored_bytes(tp_size) * value_bytes / 2),
        )


def device_finding(device: str, ranks: int, gpus: Sequence[str]) -> Finding:
    """Args: gpus: names of those that PyTorch sees."""
    if device == "cpu":
        return _ok("device", "CPU")
    if len(gpus) < ranks:
        text = f"{ranks} ranks on this machine, but {len(gpus)} GPUs: lower --tp-size or --dp-size"
        return Finding("mend", "device", text)
    return _ok("device", f"{ranks} x {gpus[0]}")


def memory_finding(
    server: "ResolvedServer",
    kv: KvSizes,
    config: CakeConfig,
    free_bytes: int,
    *,
    reads: int,
    can_pin: Callable[[int], bool] | None = None,
) -> Finding:
    """Whether the host memory of all ranks is there.

    Args:
        free_bytes: of host memory, for this process.
        reads: of the store, at once.
        can_pin: size in bytes -> whether a GPU takes that much as pinned; None: need not.
    """
    block_tokens = config.block_tokens_in(server.page_tokens)
    try:
        counts = buffer_counts(
            load_bytes=kv.block_bytes,
            write_bytes=kv.block_bytes,
            reads=reads,
            chunk_blocks=-(-server.chunk_tokens // block_tokens),
            pool_blocks=(server.pool_tokens or NO_LIMIT) // block_tokens,
            end_blocks=kv.end_blocks,
            staging_bytes=config.staging_bytes,
            write_queue_bytes=config.write_queue_bytes,
            available_bytes=free_bytes // server.ranks,
        )
    except ConfigError as error:
        return Finding("mend", "host memory", str(error))
    size_bytes = (counts.loads + counts.writes) * kv.block_bytes
    text = f"{mib(size_bytes)} a rank, in blocks of {exact_size_text(kv.block_bytes)}, of "
    text += f"{size_text(free_bytes)} available to this process"
    if can_pin is not None and not can_pin(size_bytes):
        text = f"{mib(size_bytes)} cannot be pinned, so copies to and from the GPU would be slow: "
        return Finding("mend", "host memory", text + pin_advice())
    if counts.reduced:
        return Finding("note", "host memory", text + ", which is less than the default takes")
    return _ok("host memory", text)


# ---- stores ----


def stores_of(config: CakeConfig) -> list[NamedStore]:
    """The stores of the settings, a tier each. Raises: ConfigError."""
    sources = parse_sources(config.store, config.eviction_policy, reads_count=False)
    if config.store is None:
        return [NamedStore("default", source) for source in sources]
    urls = split_urls(config.store)
    return [NamedStore(url.shown, source) for url, source in zip(urls, sources, strict=True)]


async def store_findings(
    store: NamedStore,
    depth: int,
    kv: KvSizes | None,
    *,
    bench_bytes: int = BENCH_BYTES,
    bench_s: float = BENCH_S,
    hang_s: float = HANG_S,
) -> tuple[list[Finding], float | None]:
    """Whether a store can be reached and used, and how many bytes per second it reads.

    Args:
        kv: None if the model is not known.
        bench_bytes: written and read.
        bench_s: limit for that.
        hang_s: further time, in which calls end that cannot be cancelled.

    Cancellation: waits until the written blocks are deleted, for `hang_s` at most.
    """
    tasks: list[asyncio.Task[Any] | None] = []

    async def measuring() -> tuple[list[Finding], float | None]:
        tasks.append(asyncio.current_task())  # of the loop in the other thread
        return await _measured(store, depth, kv, bench_bytes, bench_s)

    measured = asyncio.ensure_future(run_in_own_thread(lambda: asyncio.run(measuring())))
    try:
        await asyncio.wait([measured], timeout=bench_s + hang_s)
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):  # it has just ended
            for task in filter(None, tasks):
                task.get_loop().call_soon_threadsafe(task.cancel)
        await asyncio.wait([measured], timeout=hang_s)
        raise
    if not measured.done():
        measured.cancel()
        text = f"{store.url}: a call has hung for {hang_s:g} s: see that the disk or server answers"
        return [Finding("mend", "store", text)], None
    return measured.result()


async def _measured(
    store: NamedStore, depth: int, kv: KvSizes | None, bench_bytes: int, bench_s: float
) -> tuple[list[Finding], float | None]:
    block_bytes = UNKNOWN_BLOCK_BYTES if kv is None else kv.block_bytes
    block_bytes = max(4096, min(block_bytes, LARGEST_BLOCK_BYTES))
    try:
        with progress(f"measuring {store.url}", total=2, unit="run") as bar:
            async with asyncio.timeout(bench_s):
                await run_in_own_thread(store.source.check)
                (speed,) = await measure_size(store, block_bytes, [depth], bench_bytes, bar)
    except TimeoutError:
        if store.files is not None and store.files.is_being_rebuilt():
            text = f"{store.url}: its index is being rebuilt, as after a restart of the machine; "
            text += "a server or `sglang-cake store gc` completes that. Reading and writing were "
            return [Finding("note", "store", text + "not measured"), *_spaces(store, kv)], None
        text = f"{store.url}: {bench_s:g} s were not enough to write and read "
        text += f"{size_text(max(bench_bytes, 2 * depth * block_bytes))}: use a faster one"
        return [Finding("mend", "store", text)], None
    except FullStore as error:
        text = f"{redacted(str(error))}; reading and writing were not measured"
        if store.files is not None:
            text += ": `sglang-cake store bench` measures an empty folder on the same disk"
        return [Finding("note", "store", text), *_spaces(store, kv)], None
    except ConfigError as error:
        return [Finding("mend", "store", redacted(str(error)))], None
    except StoreError as error:
        text = f"{store.url}: {redacted(str(error))}: see that it runs, can be reached from here, "
        return [Finding("mend", "store", f"{text}and takes these credentials")], None
    text = f"{store.url}: reads {size_text(speed.read_bytes_per_s)}/s, writes "
    text += f"{size_text(speed.write_bytes_per_s)}/s, in blocks of {exact_size_text(block_bytes)}"
    if speed.from_cache:
        text += "; these reads came from the page cache, and a disk is slower"
    line = Finding("note" if speed.from_cache else "ok", "store", text)
    return [line, *_spaces(store, kv)], speed.read_bytes_per_s


def _spaces(store: NamedStore, kv: KvSizes | None) -> list[Finding]:
    """The space of a folder; empty for other stores, and where it is not known what the folder
    takes, as while its index is being rebuilt."""
    if (files := store.files) is None or (used_bytes := files.stats().used_bytes) is None:
        return []
    room_bytes = math.inf
    if (free := free_bytes(os.statvfs(files.path))) is not None:
        room_bytes = free - files.min_free_bytes + used_bytes
    usable_bytes = min(room_bytes, files.capacity_bytes or room_bytes)
    if usable_bytes == math.inf:
        return [_ok("space", f"no limit in {files.path}")]
    text = f"{size_text(usable_bytes)} in {files.path}"
    if kv is not None:
        text += f", for the KV of {count_text(usable_bytes / kv.stored_token_bytes)} tokens"
    if files.capacity_bytes is not None and files.capacity_bytes > room_bytes:
        text += f": the disk has no room for the capacity of {size_text(files.capacity_bytes)}"
        text += f" beside {size_text(files.min_free_bytes)} that stay free"
        return [Finding("note", "space", text)]
    return [_ok("space", text)]


# ---- gain ----


def gain_findings(
    model: str,
    server: "ResolvedServer",
    block_tokens: int,
    gpu: tuple[str, int] | None,
    speeds: Sequence[float],
) -> list[Finding]:
    """The gain with the fastest tier, and a note for each slower tier that is too slow: it makes no
    load slower, since a block is read from the tier that delivers it first.

    Args:
        speeds: measured bytes per second of each tier, at least one.
    """
    lines = [
        gain_finding(model, server, block_tokens, gpu, bytes_per_s)
        for bytes_per_s in sorted(speeds, reverse=True)
    ]
    slower = [replace(line, state="note") for line in lines[1:] if line.state == "mend"]
    return lines[:1] if lines[0].state == "mend" else [lines[0], *slower]


def gain_finding(
    model: str,
    server: "ResolvedServer",
    block_tokens: int,
    gpu: tuple[str, int] | None,
    bytes_per_s: float,
) -> Finding:
    """The prediction of `sglang-cake plan` for this model and the measured speed of its store.

    Args:
        model: path of its config.json.
        gpu: name and bytes of memory of a rank's GPU; None: a CPU.
    """
    if gpu is None:
        return Finding("note", "gain", "not predicted for a CPU: `sglang-cake demo` measures it")
    known = _data_sheet(*gpu)
    flags = ["plan", "--model", model, "--gpu", known or "TFLOPS:TB/s:GiB"]
    flags += ["--gpus", str(server.tp_size), "--store", f"{bytes_per_s:.0f}B/s"]
    flags += ["--block-tokens", str(block_tokens), "--chunk-tokens", str(server.chunk_tokens)]
    flags += ["--smaller", f"{2 / server.kv_value_bytes:g}"]
    if known is None:
        name = f"{gpu[0]} with {size_text(gpu[1])}"
        text = f"no data sheet of {name} is known: give yours to `sglang-cake {' '.join(flags)}`"
        return Finding("note", "gain", text)
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    try:
        found = plan.predict(parser.parse_args(flags))
    except ConfigError as error:
        return Finding("note", "gain", f"`sglang-cake plan` cannot predict it: {error}")
    states: dict[str, FindingState] = {"no": "mend", "unsure": "note"}
    text = f"at {size_text(bytes_per_s)}/s of the store: {found['because']}"
    return Finding(states.get(found["answer"], "ok"), "gain", text)


def _data_sheet(gpu: str, memory_bytes: int) -> str | None:
    """The key of `GPUS` that is a word of this name, if its memory is about as large."""
    words = re.findall(r"[a-z0-9]+", gpu.lower().replace("rtx ", "rtx"))
    for name, sheet in GPUS.items():
        share = memory_bytes / (sheet.memory_gib * 2**30)  # a GPU keeps some for itself
        if name in words and 0.85 < share < 1.15:
            return name
    return None
