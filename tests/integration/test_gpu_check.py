"""The GPU checks run up to the calls of CUDA, for which a device that is made up stands in."""

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import PlainRowKernel, install

from benchmarks.gpu import (
    check,
    encoded,
    end_states,
    environment,
    exact,
    memory,
    overlap,
    sanitizer,
    serve,
    sglang_kernels,
    speed,
)
from benchmarks.gpu.measuring import FULL, SMALL, Finding, Load, not_run
from benchmarks.gpu.stand_ins import PoolForm, make_pool
from sglang_cake.core.layout import BlockLayout
from sglang_cake.demo.sglang_server import Reply
from sglang_cake.integration.memory import host_pools, kv_pool
from sglang_cake.integration.memory.host_pools import PIN_BYTES
from sglang_cake.integration.memory.kv_pool import CudaKV

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
FORMS = {
    "MHA": PoolForm(layers=2, heads=2, dim=8, v_dim=8),
    "K and V of other widths, fp8": PoolForm(2, 1, 12, 8, torch.float8_e4m3fn),
    "MLA": PoolForm(layers=2, heads=1, dim=36, v_dim=0, dtype=torch.float32),
    "DSA": PoolForm(layers=2, heads=1, dim=36, v_dim=0, index_page_bytes=64 * 132),
    "MiniMax": PoolForm(layers=3, heads=2, dim=8, v_dim=8, index_dim=12),
    "scales": PoolForm(2, 2, 8, 8, torch.float8_e4m3fn, scale_bytes=4),
    "pages of heads": PoolForm(layers=2, heads=2, dim=8, v_dim=8, is_hnd=True),
    "memory of all pools": PoolForm(layers=2, heads=2, dim=8, v_dim=8, is_shared=True),
}
# That hold half of a block at most.
PLACE_BYTES = {"MHA": 4096, "MLA": 12288, "DSA": 12288, "memory of all pools": 4096}
CASES = [
    (form, page) for form in FORMS for page in (1, 64) if page > 1 or not FORMS[form].has_pages
]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does at once what it is told."""
    install(monkeypatch, 0, eager=True)
    # PyTorch pins no memory without a GPU.
    unpinned: Callable[[int], torch.Tensor] = lambda size: torch.empty(size, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(speed, "pinned_by_torch", unpinned)


# ---- the steps ----


@pytest.mark.parametrize(("form", "page"), CASES)
def test_gpu_check_copies_are_compared_with_plain_indexing(
    monkeypatch: pytest.MonkeyPatch, eager: None, form: str, page: int
) -> None:
    load = Load(SMALL, torch.cuda.Stream(), CPU)
    assert exact.copies_of(FORMS[form], page, load, CPU) == ""
    if form in PLACE_BYTES:
        assert exact.copies_of(FORMS[form], page, load, CPU, place_bytes=PLACE_BYTES[form]) == ""

    class Twisted(PlainRowKernel):
        def scatter(self, blocks: Any, slots: Any, piece: Any = None) -> None:
            super().scatter(blocks.roll(1, dims=1), slots, piece)

    install(monkeypatch, 0, eager=True, kernel=Twisted)
    load = Load(SMALL, torch.cuda.Stream(), CPU)
    assert "after loads" in exact.copies_of(FORMS[form], page, load, CPU)


def test_gpu_check_captures_show_a_thread_that_spoils_them(
    monkeypatch: pytest.MonkeyPatch, eager: None
) -> None:
    assert [each.ok for each in exact.captures(SMALL, CPU)] == [True]
    monkeypatch.setattr(kv_pool, "exchange_capture_mode", lambda mode: 0)
    monkeypatch.setattr(exact, "COPY_LIMIT_S", 0.1)
    with pytest.raises((RuntimeError, TimeoutError)):
        list(exact.captures(SMALL, CPU))


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_gpu_check_reused_slots_show_copies_that_are_not_ordered(
    monkeypatch: pytest.MonkeyPatch, seed: int, own_stream: bool
) -> None:
    """Streams go on in any order that events allow."""
    install(monkeypatch, seed)
    load = Load(SMALL, torch.cuda.Stream(), CPU) if own_stream else None

    def found(*, ordered: bool) -> tuple[int, int]:
        pool = make_pool(FORMS["MHA"], exact.SLOTS, device=CPU)
        stream = load.stream if load else None
        kv = CudaKV(pool, block_tokens=exact.BLOCK_TOKENS, forward_stream=stream)
        return exact.reuse(kv, SMALL.turns, load, seed=seed, ordered=ordered)

    wrong, checked = found(ordered=True)
    assert wrong == 0
    assert checked > 10
    assert found(ordered=False)[0] > 0


@pytest.mark.parametrize("kind", end_states.KINDS)
def test_gpu_check_end_states_show_copies_that_are_not_ordered(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Streams go on in any order that events allow."""
    seeds = range(6)

    def found(**waits: bool) -> list[str]:
        results = []
        for seed in seeds:
            install(monkeypatch, seed)
            results.append(
                end_states.moved(kind, Load(SMALL, torch.cuda.Stream(), CPU), CPU, **waits)
            )
        return results

    assert found() == [""] * len(seeds)
    assert any(found(fenced=False))
    assert any(found(ordered=False))


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_gpu_check_decoded_blocks_are_compared(eager: None, codec: str) -> None:
    layout = BlockLayout.plain(2, encoded.LAYOUTS["MHA"], "bfloat16", 64)
    assert encoded.decoded(layout, codec, CPU) == ""


@pytest.mark.parametrize(
    "step",
    [
        *(speed.memcpy, speed.row_kernel, speed.cake_copies, speed.launches),
        *(sanitizer.sanitized, end_states.end_states, memory.pinning, memory.waiting_slots),
    ],
    ids=lambda step: step.__name__,
)
def test_gpu_check_other_steps_run(eager: None, step: Callable[..., Iterator[Finding]]) -> None:
    found = list(step(SMALL, CPU))
    assert found
    assert all(each.ok is not False for each in found)


def test_gpu_check_decoding_is_measured(eager: None) -> None:
    assert len(list(encoded.decoding(SMALL, CPU))) == 3 * len(encoded.CODECS)


class LockedCuda:
    """`cudart` with time of its own: a call takes 1 s a GB, and launches are in between."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._now_s = self._launched_s = 0.0

    def perf_counter(self) -> float:
        """Called after each launch."""
        with self._turn:
            self._launched_s = self._now_s
            self._turn.notify_all()
            return self._now_s

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        with self._turn:
            self._now_s += size_bytes / 1e9
            assert self._turn.wait_for(lambda: self._launched_s == self._now_s, 60.0)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


@pytest.mark.parametrize(("chunk_bytes", "well"), [(PIN_BYTES // 8, True), (2**40, False)])
def test_gpu_check_pinning_shows_forwards_that_wait(
    monkeypatch: pytest.MonkeyPatch, eager: None, chunk_bytes: int, well: bool
) -> None:
    cuda = LockedCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(memory, "time", cuda)
    monkeypatch.setattr(host_pools, "PIN_BYTES", chunk_bytes)
    found = list(memory.pinning(replace(SMALL, has_goals=True), CPU))
    assert found[-1].ok is well
    times = {each.what: each.value for each in found[:-1]}
    size_bytes = float(times["host memory"]) * 1e9
    assert times["longest time between launches, in one call"] == pytest.approx(size_bytes / 1e6)
    assert times["longest time between launches, in chunks"] == pytest.approx(
        min(chunk_bytes, size_bytes) / 1e6
    )


@pytest.mark.parametrize("well", [True, False])
def test_gpu_check_waiting_slots_show_lists_that_are_kept(
    monkeypatch: pytest.MonkeyPatch, eager: None, well: bool
) -> None:
    def memory_allocated(device: torch.device) -> int:
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        memories = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        return sum(each.nbytes() for each in memories.values())

    monkeypatch.setattr(torch.cuda, "memory_allocated", memory_allocated)
    if not well:
        monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)
    *_, kept = memory.waiting_slots(replace(SMALL, has_goals=True), CPU)
    assert kept.ok is well


def test_gpu_check_sizes_are_those_of_llama_3_8b() -> None:
    assert FULL.form.token_bytes * FULL.block_tokens == 16 * 2**20


def _findings(auto_s: float, block_s: float) -> dict[str, bool | None]:
    """Of a cell in which computing and loading take 4 s each, and T* is 2 s."""
    size = replace(FULL, question_tokens=1, chunk_tokens=8192)
    arms: dict[Any, overlap.Arm] = {mode: overlap.Arm() for mode in overlap.MODES}
    link = size.form.token_bytes * 32768 / 4 / 1e9
    for mode, ttft_s in (("compute", 4.0), ("load", 4.0), ("auto", auto_s)):
        arms[mode].ttft_s.append(ttft_s)
        arms[mode].steps_s.append([1.0, 1.0, 1.0, 1.0] if mode == "compute" else [0.001])
        arms[mode].bytes_per_s.append(size.form.token_bytes * 128 / block_s)
        arms[mode].plan_s.append(0.001)
        arms[mode].steps.append([(1.0, 1.1)])
        arms[mode].errors.append(auto_s / 10)
    return {each.what.partition(": ")[2]: each.ok for each in overlap.cell(size, link, 32768, arms)}


def test_gpu_check_overlap_passes_only_near_its_goals() -> None:
    link_block_s = 4 * 128 / 32768
    well, badly = _findings(2.05, 1.05 * link_block_s), _findings(5.5, 1.25 * link_block_s)
    judged = {
        *("auto to the better single way", "error of predicted steps"),
        *("loaded by auto", "loaded by load"),
    }
    assert {what for what, ok in well.items() if ok} == judged
    assert {what for what, ok in badly.items() if ok is False} == judged


def test_gpu_check_figures_of_tiny_sizes_have_no_goal() -> None:
    assert FULL.at_most(1, "x", 2).ok is FULL.at_least(2, "x", 1).ok is False
    assert FULL.at_most(2, "x", 2).ok is FULL.at_least(1, "x", 1).ok is True
    assert SMALL.at_most(1, "x", 2).ok is SMALL.at_least(2, "x", 1).ok is None


def test_gpu_check_copies_have_goals(eager: None) -> None:
    """Which a device that is made up does not reach."""
    found = {each.what: each for each in speed.cake_copies(replace(SMALL, has_goals=True), CPU)}
    judged = {what for what, each in found.items() if each.ok is not None}
    assert judged >= {
        *("host time of a loaded block", "host time of a saved block"),
        *("loads, beside products", "device memory of copies, peak"),
    }
    assert found["loads, beside products"].ok is False


# ---- the command ----


def _outcome(status: int | None = 0, **finding: Any) -> dict[str, Any]:
    findings = [{"what": "x", "value": 1.0, "unit": "s", "ok": None, **finding}]
    return check.outcome("memcpy", findings, status, "Traceback\nKeyError: 'x'", 1.0)


def test_gpu_check_outcomes_pass_only_without_errors_and_wrong_findings() -> None:
    assert _outcome()["status"] == _outcome(ok=True)["status"] == check.PASS
    assert _outcome(ok=False)["status"] == check.FAIL
    assert _outcome(status=1)["status"] == _outcome(status=None)["status"] == check.FAIL
    assert _outcome(status=None)["error"].startswith("hung")


def test_gpu_check_outcome_of_a_step_that_lacks_all_it_needs_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lacking, figure = asdict(not_run("x is not installed")), asdict(Finding("y", 1.0))

    def outcome(*findings: dict[str, Any], status: int = 0) -> dict[str, Any]:
        return check.outcome("memcpy", list(findings), status, "", 1.0)

    skipped = outcome(lacking)
    assert skipped["status"] == check.SKIPPED
    assert "x is not installed" in check.text_of([skipped])
    assert outcome(lacking, figure)["status"] == outcome()["status"] == check.PASS
    assert outcome(lacking, status=1)["status"] == check.FAIL
    monkeypatch.setattr(check, "run_step", lambda name, **options: skipped)
    out = ["--out", str(tmp_path / "gpu.json")]
    assert check.main(["--steps", "memcpy", *out]) == 0


def test_gpu_check_sanitizer_that_is_not_there_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "TOOL", "/nonexistent/compute-sanitizer")
    monkeypatch.setenv("PATH", "")
    (found,) = sanitizer.sanitizer(SMALL, CPU)
    assert (found.what, found.value) == (
        check.NOT_RUN,
        "compute-sanitizer is not on this machine",
    )


def test_gpu_check_table_has_every_finding_and_the_last_line_of_an_error() -> None:
    text = check.text_of([_outcome(value=1234.5), _outcome(status=1, ok=False, value="differs")])
    assert "1,234" in text
    assert "differs" in text
    assert "KeyError" in text
    assert check.FAIL in text


def test_gpu_check_arguments_name_steps() -> None:
    assert check.parse_args([]).steps == list(check.STEPS)
    assert check.parse_args(["--steps", "memcpy,overlap"]).steps == ["memcpy", "overlap"]
    with pytest.raises(SystemExit):
        check.parse_args(["--steps", "nothing"])


def test_gpu_check_steps_exist() -> None:
    modules = {"environment": environment, "exact": exact, "speed": speed, "encoded": encoded}
    modules |= {"overlap": overlap, "sanitizer": sanitizer, "end_states": end_states}
    modules |= {"sglang_kernels": sglang_kernels, "memory": memory}
    for place in (check.STEPS | check.INNER).values():
        module, _, function = place.partition(":")
        assert callable(getattr(modules[module], function))


def test_gpu_check_findings_are_written_one_by_one(eager: None, tmp_path: Path) -> None:
    found = tmp_path / "found"
    check.run_here("memcpy", found, small=True, device="cpu")
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    assert {"to the device, registered memory", "a block"} <= {line["what"] for line in lines}
    assert check.outcome("memcpy", lines, 0, "", 1.0)["status"] == check.PASS


def test_gpu_check_without_a_gpu_says_so_and_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "sglang.py").write_text("raise ModuleNotFoundError('it is not needed')\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    out = tmp_path / "gpu.json"
    assert check.main(["--small", "--out", str(out)]) == 1
    (outcome,) = json.loads(out.read_text())["outcomes"]
    assert outcome["status"] == check.FAIL
    assert "no NVIDIA GPU" in outcome["error"]
    assert "no NVIDIA GPU" in capsys.readouterr().out


BARE = """
import json, sys
from dataclasses import asdict
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from benchmarks.gpu import stand_ins
stand_ins.install()
import pytest, torch
from fake_cuda import install
from benchmarks.gpu import environment, exact, measuring, overlap, sanitizer, speed
from benchmarks.gpu import memory, sglang_kernels
install(pytest.MonkeyPatch(), 0, eager=True)
steps = memory.pinning, memory.waiting_slots, sglang_kernels.sglang_kernels, overlap.overlap
for step in steps:
    for each in step(measuring.SMALL, torch.device("cpu")):
        print(json.dumps(asdict(each)))
"""


def test_gpu_check_overlap_loop_serves_prompts_and_finds_a_wrong_byte() -> None:
    """It needs neither SGLang nor what only servers need. Decoding alone needs numba: a numba that
    does not load costs no other step."""
    missing = {
        "sglang",
        "numba",
        "sgl_kernel",
        "aiohttp",
        "cryptography",
        "gunicorn",
        "msgspec",
        "zmq",
        "zstandard",
    }
    done = subprocess.run(
        [sys.executable, "-c", BARE.replace("{names}", repr(missing))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        stdout=subprocess.PIPE,
        check=True,
    )
    findings = [Finding(**json.loads(line)) for line in done.stdout.splitlines()]
    assert [each for each in findings if each.ok is False] == []
    assert [each.value for each in findings if each.what == check.NOT_RUN] == [
        "sgl_kernel is not installed",
        "sglang.kernels is not installed",
    ]
    found = {each.what: each.value for each in findings}
    assert found["the same with one wrong byte in the store"] > 0
    for mode in ("compute", "load", "auto", "T*"):
        assert found[f"0.05 GB/s, 517 tokens: {mode}"] > 0


# ---- servers ----


def test_gpu_serve_arguments_and_flags_of_every_arm(tmp_path: Path) -> None:
    args = serve.parse_args([])
    assert args.cases == list(serve.CASES)
    assert args.arms == list(serve.ARMS)
    with pytest.raises(SystemExit):
        serve.parse_args(["--cases", "nothing"])
    with pytest.raises(SystemExit):  # nothing would say how far answers may differ
        serve.parse_args(["--arms", "auto,load"])
    assert serve.flags_of("off", tmp_path, None)[0] == []
    flags, _ = serve.flags_of("auto", tmp_path, "8GB/s")
    assert f"file://{tmp_path}?bandwidth=8GB/s" in flags
    flags, env = serve.flags_of("hicache-wait_complete", tmp_path, None)
    assert flags[-1] == "wait_complete"
    assert str(tmp_path) in env.values()


def _reply(ids: list[int], ttft_s: float, logprob: float, loaded: int) -> Reply:
    """The first token could be one of two, of which the second has log probability -3."""
    first = [[logprob, 1, None], [-3.0, 2, None]]
    meta = {"cake": {"loaded_tokens": loaded}, "output_token_ids_logprobs": [first]}
    return Reply(ids, meta, 0.0, ttft_s)


def test_gpu_serve_summary_compares_with_the_first_answer() -> None:
    cold = _reply([1, 2, 3], 2.0, -1.0, 0)
    found = serve.summary(cold, [_reply([1, 2, 4], 1.0, -1.25, 128)])
    assert (found["cold_s"], found["ttft_s"], found["same_tokens"]) == (2.0, 1.0, 2)
    assert found["logprob_gap"] == pytest.approx(0.25 / 2**0.5)
    result = {"case": "default", "arm": "auto", "prompts": {16384: found}, "load": {}}
    failed = {"case": "mla", "arm": "off", "error": "the server ended\nno memory"}
    text = serve.text([result, failed])
    assert "16,384" in text
    assert "no memory" in text


@pytest.mark.parametrize(("gap", "right"), [(0.19, True), (0.21, False)])
def test_gpu_serve_answers_differ_by_twice_as_much_as_those_of_other_chunks(
    gap: float, right: bool
) -> None:
    def result(case: str, arm: str, **found: float) -> dict[str, Any]:
        return {"case": case, "arm": arm, "prompts": {16384: found}}

    auto = result("default", "auto", logprob_gap=gap)
    off = result("default", "off", logprob_gap=0.0, chunk_gap=0.1)
    others = result("fp8", "off", logprob_gap=0.0, chunk_gap=1.0)
    assert serve.is_right(off, [off, auto, others])
    assert serve.is_right(auto, [off, auto, others]) is right
    assert not serve.is_right({**auto, "error": "the server ended"}, [off])


def test_gpu_results_have_the_name_of_their_device() -> None:
    name = check.result_file("gpu-serve", "NVIDIA H100 80GB HBM3", small=True).name
    assert name == "gpu-serve-nvidia-h100-80gb-hbm3-small.json"


OPERATIONS = """
import torch
import benchmarks.gpu.common_ops
ops, norm = torch.ops.sgl_kernel, torch.nn.functional.rms_norm
x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.rand(64)
out, both = torch.empty_like(x), x + residual
ops.rmsnorm.default(out, x, weight, 1e-6, False)
torch.testing.assert_close(out, norm(x, (64,), weight, 1e-6))
ops.fused_add_rmsnorm.default(x, residual, weight, 1e-6, False)
torch.testing.assert_close(residual, both)
torch.testing.assert_close(x, norm(both, (64,), weight, 1e-6))
assert ops.weak_ref_tensor(x).data_ptr() == x.data_ptr()
"""


def test_gpu_serve_operations_in_place_of_kernels_are_those_of_pytorch() -> None:
    """In a process of its own: SGLang looks at what is defined."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", OPERATIONS], cwd=ROOT, env=env, check=True)
