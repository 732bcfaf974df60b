"""A server in which each hook of cake raises. It answers as without cake."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from live import ADMIN, ADMIN_KEY, BLOCK, CHUNK, Live, PendingRequest, Start, assert_same
from polling import until

Make = Callable[[int], list[int]]
POOL = 2560
# Hooks that a request on a stored prompt calls, or a flush.
HOOKS = (
    "Scheduler._add_request_to_queue",
    "Scheduler._process_hicache_events",
    "SchedulePolicy.calc_priority",
    "TokenizerManager.update_request_meta_info",
    "TpModelWorker.forward_batch_generation",
    "CakePrefillAdder.add_one_req",
    "CakePrefillAdder._commit_prefill_admission",
    "CakeRadixCache.checkpoint",
    "CakeRadixCache.on_release",
)
# Others of the same classes.
MORE_HOOKS = (
    "Scheduler.get_prefill_adder_class",
    "Scheduler.on_idle",
    "SchedulerOutputStreamer.get_cached_tokens_details",
    "CakePrefillAdder.__init__",
    "CakePrefillAdder.add_chunked_req",
    "CakePrefillAdder._select_prefill_admission",
    "CakeRadixCache.reset",
    "CakeRadixCache.evict",
)


@dataclass(frozen=True, slots=True)
class Faulty:
    live: Live
    folder: Path

    def order(self, hook: str, number: int = 1) -> None:
        (self.folder / "reached").unlink(missing_ok=True)
        draft = self.folder / "draft"
        draft.write_text(f"{hook} {number}")
        draft.rename(self.folder / "order")

    @contextlib.contextmanager
    def failing(self, hook: str, number: int = 1) -> Iterator[None]:
        """The body makes SGLang call the hook. Checks that the failure is counted, and that the
        server works afterwards."""
        before = self.live.metric("hook_failures_total", hook=hook)
        self.order(hook, number)
        yield
        until((self.folder / "reached").exists, f"{hook} is called")
        until(lambda: self.live.metric("hook_failures_total", hook=hook) == before + 1, "it counts")
        self.live.flush()
        self.live.check_log()


@contextlib.contextmanager
def faulty_server(
    start: Start, model: Path, store: Path, folder: Path, env: dict[str, str]
) -> Iterator[Faulty]:
    folder.mkdir()
    flags = (
        *("--dtype", "float32", "--max-total-tokens", str(POOL), "--cake-mode", "load"),
        *("--enable-metrics", "--admin-api-key", ADMIN_KEY),
    )
    env = {**env, "CAKE_TEST_FAULTS": str(folder)}
    with start(model, flags, store=store, bandwidth="1GB/s", env=env) as live:
        live.headers = ADMIN
        yield Faulty(live, folder)


@pytest.fixture(scope="module")
def patient(
    start: Start, models: dict[str, Path], folder: Path, standins: dict[str, str]
) -> Iterator[Faulty]:
    """A server on which no number of failures switches cake off."""
    store, env = folder / "store-faulty", {**standins, "CAKE_TEST_PATIENT": "1"}
    with faulty_server(start, models["first"], store, folder / "faults", env) as faulty:
        yield faulty


@pytest.fixture(scope="module")
def impatient(
    start: Start, models: dict[str, Path], folder: Path, standins: dict[str, str]
) -> Iterator[Faulty]:
    store = folder / "store-impatient"
    with faulty_server(start, models["first"], store, folder / "faults-2", standins) as faulty:
        yield faulty


@pytest.mark.parametrize(
    "hook", [*HOOKS, *(pytest.param(hook, marks=pytest.mark.breadth) for hook in MORE_HOOKS)]
)
def test_hook_raising_once_leaves_the_answer_unchanged(
    patient: Faulty, plain: Live, prompt: Make, hook: str
) -> None:
    live, stored = patient.live, prompt(14 * BLOCK)
    live.ask_and_store(stored)
    live.flush()
    ids = stored + prompt(2 * CHUNK + 9)  # the rest is computed in chunks
    reference = plain.reference(ids)
    others = [prompt(9 * BLOCK) for _ in range(4)] if hook.endswith("evict") else []
    with patient.failing(hook):
        for other in others:  # more than the pool holds
            live.ask(other, 1)
        assert_same(live.ask(ids), reference)
        if hook.endswith("reset"):
            live.flush()
    again = live.ask_flushed(ids)
    assert_same(again, reference)
    assert again.loaded > 0  # cake goes on


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.breadth), 7])
@pytest.mark.parametrize(
    "hook",
    ["Scheduler._process_hicache_events", "CakePrefillAdder.add_one_req", "CakeRadixCache.evict"],
)
def test_hook_raising_during_a_load_leaves_answers_unchanged(
    patient: Faulty, plain: Live, prompt: Make, hook: str, number: int
) -> None:
    live, ids = patient.live, prompt(30 * BLOCK)
    live.ask_and_store(ids)
    live.flush()
    with patient.failing(hook, number):
        asked = [
            PendingRequest(live, ids[: (30 - i) * BLOCK], rid=f"{hook}-{number}-{i}")
            for i in range(3)
        ]
        for i, asking in enumerate(asked):
            assert asking.answer().tokens == plain.reference(ids[: (30 - i) * BLOCK]).tokens
        while (patient.folder / "order").exists():  # a load may have ended before the Nth call
            live.ask_flushed(ids, 1)
            live.ask(prompt(20 * BLOCK), 1)


def test_abort_hook_raising_leaks_nothing(patient: Faulty, prompt: Make) -> None:
    live = patient.live
    with patient.failing("CakeRadixCache.release_aborted_request"):
        while (patient.folder / "order").exists():
            asked = [
                PendingRequest(live, prompt(20 * BLOCK), new_tokens=64, rid=f"a-{i}")
                for i in range(4)
            ]
            for asking in asked:
                live.post("/abort_request", rid=asking.rid)
            for asking in asked:
                with contextlib.suppress(AssertionError):  # aborted before it began
                    asking.answer()


@pytest.mark.parametrize("way", ["attach", "detach"])
def test_store_swap_hook_raising_is_refused_and_the_store_stays(
    patient: Faulty, prompt: Make, way: str, tmp_path: Path
) -> None:
    live, ids = patient.live, prompt(6 * BLOCK)
    with patient.failing(f"Scheduler.{way}_hicache_storage_wrapped"):
        store = {"store": f"file://{tmp_path}/other?min_free=0"}
        reply = live.ask_store("PUT", **store) if way == "attach" else live.ask_store("DELETE")
        assert reply.status_code == 400
    live.ask_and_store(ids)  # in the old store
    assert live.ask_flushed(ids).loaded > 0


def test_hook_failures_repeated_switch_cake_off_for_good(
    impatient: Faulty, plain: Live, prompt: Make
) -> None:
    live, ids = impatient.live, prompt(14 * BLOCK)
    live.ask_and_store(ids)
    assert live.ask_flushed(ids).loaded > 0
    assert live.metric("on") == 1
    for hook in HOOKS[:3]:
        with impatient.failing(hook):
            assert_same(live.ask_flushed(ids), plain.reference(ids))
    assert live.metric("on") == 0
    assert live.server.logs().count("cake is switched off") == 1
    after = live.ask_flushed(ids)
    assert_same(after, plain.reference(ids))
    assert after.cached == 0
    assert "cake" not in after.meta
    assert live.ask_store("PUT", store="file:///tmp/x").status_code == 400
    live.flush()


def test_weight_update_hook_raising_switches_cake_off_and_still_updates(
    patient: Faulty, models: dict[str, Path], prompt: Make
) -> None:
    """The last test of this server."""
    live, ids = patient.live, prompt(6 * BLOCK)
    live.ask_and_store(ids)
    first = live.ask_flushed(ids)
    assert first.loaded > 0
    with patient.failing("SchedulerWeightUpdaterManager.update_weights_from_disk"):
        live.update_weights(models["second"])
    assert live.metric("on") == 0
    second = live.ask_flushed(ids)
    assert second.cached == 0  # nothing of the old weights
    assert second.tokens != first.tokens
