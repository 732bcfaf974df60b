"""No exception of ours reaches SGLang, and every exception of SGLang passes."""

import ast
import contextlib
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("sglang")

from coordinator_harness import BLOCK, CoordinatorHarness, FakeReq, req_of
from distributions import install
from faults import Fault, replace
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP as PLUGINS
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from warm import run_forked

import sglang_cake
from sglang_cake.config import CHILD_OF_CAKE, ENABLED_ENV
from sglang_cake.core.errors import ConfigError, RunaheadError
from sglang_cake.integration import admin_api, plugin, response_stats
from sglang_cake.integration.boundary import (
    AMONG_REQUESTS,
    BOUNDARY,
    MOST_FAILURES,
    Boundary,
    Health,
    register,
)
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.overlap.layer_gate import LayerGate
from sglang_cake.integration.scheduler import scheduler_hooks  # noqa: F401 - its parts are guarded
from sglang_cake.integration.scheduler.prefill_adder import AS_SGLANG, CakePrefillAdder

PACKAGE = Path(sglang_cake.__file__).parent
UNSAFE = "Identity.poll"  # the only part of a class that is


class Tree:
    """Records what the boundary asks of the tree."""

    def __init__(self) -> None:
        self.calls: list[str | None] = []

    def forget(self, rid: str | None) -> None:
        self.calls.append("all" if rid is None else rid)

    def switch_off(self) -> None:
        self.calls.append("off")


@pytest.fixture
def tree() -> Tree:
    made = Tree()
    BOUNDARY.set_handler(made, None)
    return made


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> "dict[str, list[Any]]":
    """SGLang's registry, with every hook of ours in it and none applied."""
    hooks: dict[str, list[Any]] = defaultdict(list)
    monkeypatch.setattr(HookRegistry, "_hooks", hooks)
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    monkeypatch.setattr("sglang.srt.mem_cache.registry._RADIX_CACHE_REGISTRY", {})
    monkeypatch.setenv(ENABLED_ENV, CHILD_OF_CAKE)
    plugin.register()
    response_stats.install_meta_info()
    admin_api.install(SimpleNamespace(store=None))  # type: ignore[arg-type]
    return hooks


def _raise(own: Callable[..., Any]) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise Fault(own.__name__)

    return fail


# ---- beside other plug-ins ----

OTHER_PLUGIN = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info"
SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"


def register():
    HookRegistry.register(MANAGER, meta_info, HookType.AFTER)
    HookRegistry.register(SERVER, serve, HookType.REPLACE)


def meta_info(_, manager, meta_info, *args):
    meta_info["hooks"].append("other")


def serve():
    from sglang.srt.entrypoints.http_server import app
    print("PATHS", *(getattr(route, "path", "") for route in app.router.routes))
"""
# `sys.path` decides the order in which SGLang loads plug-ins.
ANSWER = """
import sys
from types import SimpleNamespace
sys.path.insert({place}, {site!r})
from sglang.srt.plugins import load_plugins
load_plugins()
{launch}
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import TokenizerManager
manager = SimpleNamespace(_accumulate_request_meta_info=lambda *args: None)
state = SimpleNamespace(customized_info_accumulated={{"cake": [{{"loaded_tokens": 1}}]}})
meta_info = {{"hooks": []}}
TokenizerManager.update_request_meta_info(manager, meta_info, state, {{}}, 0, None)
print("META", meta_info)
"""
LAUNCH = """
from sglang.srt.server_args import prepare_server_args
for _ in range(2):  # a process may build several engines
    flags = ["--device", "cpu", "--attention-backend", "torch_native", "--enable-cake"]
    prepare_server_args(["--model-path", "none", *flags]).resolve_once()
from sglang.srt.entrypoints import http_server
http_server._setup_and_run_http_server()
"""


def _answer_beside_other_plugin(folder: Path, launch: str, *, first: bool) -> str:
    """What a process of a server prints that has a second plug-in with hooks of the same functions.

    Args: first: whether SGLang loads that plug-in before cake.
    """
    site, program = folder / "site", folder / "program.py"
    install(site, "cake_other_plugin", PLUGINS, "other = cake_other_plugin:register")
    (site / "cake_other_plugin.py").write_text(OTHER_PLUGIN)
    place = "0" if first else "len(sys.path)"
    program.write_text(ANSWER.format(place=place, site=str(site), launch=launch))
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "XDG_CACHE_HOME": str(folder)}
    env |= {"XDG_CONFIG_HOME": str(folder)} | ({} if launch else {ENABLED_ENV: CHILD_OF_CAKE})
    said = run_forked([sys.executable, str(program)], env, folder, timeout_s=240).stdout
    assert "META {'hooks': ['other'], 'cake': {'loaded_tokens': 1}}" in said, said[-3000:]
    return said


def test_launcher_beside_a_plugin_with_the_same_hooks_has_both(tmp_path: Path) -> None:
    """Hooks of the launcher come after those that SGLang applies when it has loaded plug-ins."""
    said = _answer_beside_other_plugin(tmp_path, LAUNCH, first=True)
    (paths,) = (line.split() for line in said.splitlines() if line.startswith("PATHS "))
    assert paths.count(admin_api.PATH) == 1


def test_child_beside_a_plugin_that_is_loaded_later_has_hooks_of_both(tmp_path: Path) -> None:
    _answer_beside_other_plugin(tmp_path, "", first=False)


# ---- every hook ----


def test_boundary_every_registered_hook_is_guarded(registry: Any) -> None:
    guarded = [each for places in BOUNDARY.hooks.values() for each in places]
    assert len(registry) >= 15
    for target, hooks in registry.items():
        for _, hook, _ in hooks:
            assert hook in guarded, target


def test_boundary_is_the_only_module_that_registers_hooks() -> None:
    registering = {
        file.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "register"
        if getattr(node.value, "id", None) == "HookRegistry"
    }
    assert registering == {"boundary.py"}


def test_boundary_raising_hook_leaves_the_result_of_sglang(registry: Any, tree: Tree) -> None:
    """All of them in turn, found in the registry itself."""
    for target, hooks in registry.items():
        for kind, hook, _ in hooks:
            replace(hook, _raise)
            BOUNDARY.set_handler(Tree(), None)
            name = ".".join(target.split(".")[-2:])
            calls: list[Any] = []
            before = BOUNDARY.counts[name]
            if kind is HookType.AROUND:

                def original(*args: Any, calls: list[Any] = calls, **kwargs: Any) -> str:
                    calls.append((args, kwargs))
                    return "SGLang's"

                assert hook(original, "self", "argument", key=1) == "SGLang's", target
                assert calls == [(("self", "argument"), {"key": 1})], target
            else:
                assert hook("SGLang's", "self", "argument") is None, target  # result is kept
            assert BOUNDARY.counts[name] == before + 1, target


def test_boundary_raising_method_returns_a_false_value_and_counts() -> None:
    """All guarded parts of classes of ours that SGLang calls."""
    seen = 0
    for name, places in list(BOUNDARY.hooks.items()):
        for guarded in places:
            if guarded.__code__.co_name != "call":  # a hook that another test registered
                continue
            own = guarded.__wrapped__  # type: ignore[attr-defined]
            before, BOUNDARY.off = BOUNDARY.counts[name], False
            replace(guarded, _raise)
            try:
                handler = Tree()
                BOUNDARY.set_handler(handler, None)
                returned = guarded("self", SimpleNamespace(rid="r"))
                assert not returned or returned == AS_SGLANG
                assert BOUNDARY.counts[name] == before + 1
                assert handler.calls == (["off"] if name == UNSAFE else ["r"])
                seen += 1
            finally:
                for cell in guarded.__closure__:  # type: ignore[attr-defined]
                    if getattr(cell.cell_contents, "__name__", "") == "fail":
                        cell.cell_contents = own
    assert UNSAFE in BOUNDARY.hooks
    assert seen >= 12


@pytest.mark.parametrize("owned", [CakeRadixCache, CakePrefillAdder])
def test_boundary_every_overridden_method_is_guarded(owned: type) -> None:
    reads_only = {
        "prefix_device_indices",
        "evictable_size",
        "full_evictable_size",
        "swa_retain_floor",
    }
    same = dict.fromkeys(("evict_for_alloc", "insert", "release_swa"), "evict")
    (base,) = owned.__bases__
    overridden = {
        name for name in vars(owned) if hasattr(base, name) and callable(vars(owned)[name])
    }
    for name in overridden - reads_only:
        if name.startswith("__") and name != "__init__":
            continue
        assert BOUNDARY.hooks[f"{owned.__name__}.{same.get(name, name)}"], name


# ---- what an AROUND hook may do ----


def _around(hook: Callable[..., Any], registry: Any, **settings: Any) -> Callable[..., Any]:
    register("a.b.C.method", hook, HookType.AROUND, **settings)
    return registry["a.b.C.method"][-1][1]


def test_boundary_exception_of_sglang_passes_unchanged(registry: Any, tree: Tree) -> None:
    error = KeyError("SGLang's")

    def original() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        _around(lambda plain: plain(), registry)(original)
    assert caught.value is error
    assert tree.calls == []


def test_boundary_hook_raising_after_the_call_returns_its_result_once(
    registry: Any, tree: Tree
) -> None:
    calls = []

    def hook(plain: Any) -> None:
        plain()
        raise Fault

    assert _around(hook, registry)(lambda: calls.append(1) or "result") == "result"
    assert calls == [1]


def test_boundary_hook_raising_over_an_sglang_error_does_not_hide_it(
    registry: Any, tree: Tree
) -> None:
    def hook(plain: Any) -> None:
        try:
            plain()
        except KeyError:
            raise Fault from None

    def original() -> None:
        raise KeyError("SGLang's")

    with pytest.raises(KeyError):
        _around(hook, registry)(original)
    assert tree.calls == ["all"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_boundary_exception_that_ends_the_process_passes(
    registry: Any, tree: Tree, error: type
) -> None:
    def hook(*args: Any) -> None:
        raise error

    register("a.b.C.other", hook, HookType.AFTER)
    for guarded in (_around(hook, registry), registry["a.b.C.other"][0][1]):
        with pytest.raises(error):
            guarded(lambda: None)
    assert tree.calls == []


def test_boundary_config_error_passes_where_allowed(registry: Any, tree: Tree) -> None:
    def hook(plain: Any) -> None:
        raise ConfigError("one line")

    with pytest.raises(ConfigError):
        _around(hook, registry, passes=ConfigError)(lambda: None)


# ---- when cake is switched off ----


@given(st.lists(st.integers(0, 2 * AMONG_REQUESTS), max_size=12))
def test_health_failures_within_few_requests_are_too_many(gaps: list[int]) -> None:
    health, seen, times = Health(), 0, []
    for gap in gaps:
        for _ in range(gap):
            health.arrived()
        seen += gap
        times.append(seen)
        last = times[-MOST_FAILURES:]
        expected = len(last) == MOST_FAILURES and seen - last[0] < AMONG_REQUESTS
        assert health.failed() is expected


def test_boundary_third_failure_switches_off_and_logs_once(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for number in range(5):
        BOUNDARY.failed("here", Fault(str(number)), rid=f"r{number}")
    assert tree.calls == ["r0", "r1", "off"]
    assert sum("switched off" in each.message for each in caplog.records) == 1
    assert sum(each.exc_info is not None for each in caplog.records) == 1  # one traceback


def test_boundary_unsafe_failure_switches_off_at_once(tree: Tree) -> None:
    BOUNDARY.failed("here", Fault(), unsafe=True)
    assert tree.calls == ["off"]


def test_boundary_request_that_cannot_be_forgotten_switches_off(tree: Tree) -> None:
    tree.forget = _raise(tree.forget)  # type: ignore[method-assign]
    BOUNDARY.failed("here", Fault(), rid="r")
    assert tree.calls == ["off"]


def test_boundary_switch_off_raising_does_not_reach_sglang(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    tree.switch_off = _raise(tree.switch_off)  # type: ignore[method-assign]
    BOUNDARY.failed("here", Fault(), unsafe=True)
    assert "a failure in here could not be contained" in caplog.text
    assert BOUNDARY.off


@pytest.mark.parametrize("called", [False, True])
def test_boundary_weight_update_hook_raising_switches_off(
    registry: Any, tree: Tree, called: bool
) -> None:
    """SGLang updates them once, whether cake fails before or after."""
    (target,) = (each for each in registry if each.endswith("update_weights_from_disk"))
    ((_, hook, _),) = registry[target]
    source = SimpleNamespace(weights_or_none=lambda: None, is_local=True)
    identity = SimpleNamespace(update_source=lambda path: source if called else _raise(_raise)())
    holder: Any = CakeRadixCache.__new__(CakeRadixCache)
    holder.service = SimpleNamespace(
        identity=identity, weights_changing=lambda: None, weights_changed=_raise(_raise)
    )
    updater = SimpleNamespace(
        scheduler=SimpleNamespace(tree_cache=holder), is_fully_idle=lambda ignore_waiting: True
    )
    request = SimpleNamespace(model_path="m", load_format=None, weight_version=None)
    calls, result = [], SimpleNamespace(success=True)

    def original(*args: Any) -> Any:
        calls.append(args)
        return result

    assert hook(original, updater, request) is result
    assert calls == [(updater, request)]
    assert tree.calls == ["off"]


def test_boundary_poll_after_an_unsafe_hook_synchronizes_ranks_once(
    registry: Any, tree: Tree
) -> None:
    """The hook may have failed on one rank, which then looks for nothing and does not reduce."""
    calls: list[str] = []
    coordinator = SimpleNamespace(
        off_everywhere=False,
        timed=contextlib.nullcontext,
        adaptive=False,
        on_everywhere=lambda: calls.append("together") or True,
        poll=lambda serving, chunked, handshaking: calls.append("poll"),
    )
    identity = SimpleNamespace(poll=lambda: calls.append("identify"))
    holder = SimpleNamespace(
        coordinator=coordinator, service=SimpleNamespace(identity=identity), runahead=None
    )
    scheduler = SimpleNamespace(
        tree_cache=holder,
        chunked_req=None,
        waiting_queue=[],
        disagg_prefill_bootstrap_queue=None,
        policy=None,
        running_batch=None,
    )
    (poll,) = (each for each in registry if each.endswith("_process_hicache_events"))
    (load,) = (each for each in registry if each.endswith("begin_weight_update"))
    registry[poll][0][1](None, scheduler)
    assert calls == ["identify", "poll"]
    updater = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=None), _session=None)
    registry[load][0][1](lambda *args: None, updater, None)
    for _ in range(2):
        registry[poll][0][1](None, scheduler)
    assert calls[2:] == ["together", "identify", "poll", "identify", "poll"]


@pytest.mark.parametrize(
    ("waiting", "source", "ranks", "slept"),
    [
        (True, "socket", "", ["socket", 0.2]),
        (True, "socket", "tensor parallel", ["socket", 0.0]),
        (True, "socket", "DP attention", ["socket", 0.0]),
        (True, None, "tensor parallel", []),
        (False, "socket", "", []),
    ],
    ids=["waits", "several ranks", "DP attention", "gets requests from another rank", "idle"],
)
def test_boundary_scheduler_sleeps_only_while_it_waits_for_loads(
    registry: Any,
    waiting: bool,
    source: str | None,
    ranks: str,
    slept: list[object],
) -> None:
    """Loads of another rank wake nobody, and with DP attention other ranks wait for this one."""
    calls: list[object] = []
    tree = SimpleNamespace(
        coordinator=SimpleNamespace(
            waiting=waiting, live=[], alone=ranks != "tensor parallel", loads_over_in_s=0.2
        ),
        service=SimpleNamespace(waker=SimpleNamespace(sleep=lambda *how: calls.extend(how))),
        runahead=None,
    )
    receiver = SimpleNamespace(recv_from_tokenizer=source)
    (idle,) = (each for each in registry if each.endswith("Scheduler.on_idle"))
    scheduler = SimpleNamespace(
        tree_cache=tree,
        request_receiver=receiver,
        require_mlp_sync=ranks == "DP attention",
        disagg_prefill_inflight_queue=None,  # not a prefill server
    )
    registry[idle][0][1](None, scheduler)
    assert calls == slept


def test_boundary_failure_before_the_tree_exists_switches_off() -> None:
    boundary = Boundary()
    handler = Tree()
    boundary.failed("ModelRunner.load_model", Fault(), unsafe=True)
    boundary.set_handler(handler, None)
    assert handler.calls == ["off"]


def test_layer_gate_raising_layer_becomes_a_runahead_error(tree: Tree) -> None:
    gate = LayerGate(SimpleNamespace(register_layer_transfer_counter=lambda gate: None), 1)
    passage: Any = SimpleNamespace(reach=_raise(_raise))
    with pytest.raises(RunaheadError), gate(passage):
        gate.wait_until(0)


# ---- wherever it is raised, all slots and buffers come back ----


class Bomb:
    """Raises in the Nth call of a function of the scheduler thread's part of the package."""

    PARTS = tuple(str(PACKAGE / part) for part in ("integration", "loading"))

    def __init__(self, number: int) -> None:
        self.number, self.calls, self.where = number, 0, ""
        self.places: dict[tuple[str, str, int], list[int]] = {}  # the calls from each line

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.PARTS):
            return
        if code.co_name.startswith("<"):  # what ends a generator early cannot raise
            return
        self.calls += 1
        caller = cast(FrameType, frame.f_back)
        place = (code.co_qualname, caller.f_code.co_qualname, caller.f_lineno)
        self.places.setdefault(place, []).append(self.calls)
        if self.calls == self.number:
            self.where = frame.f_code.co_qualname
            raise Fault(self.where)


def _steps(harness: CoordinatorHarness, req: FakeReq) -> Iterator[Callable[[], Any]]:
    """A prompt of which the last blocks are loaded and the first computed."""
    coordinator = harness.coordinator
    yield lambda: coordinator.arrive(req, lambda tokens, limit: 0)
    for _ in range(4):
        harness.settle()
        yield lambda: coordinator.poll([req.rid])
    for _ in range(6):
        yield lambda: coordinator.attach_islands(req, harness.attach)
        yield lambda: coordinator.plan(req, BLOCK)
        stop = min(req.prefix_len + BLOCK, len(req.origin_input_ids))
        slots = harness.allocator.alloc(-(-(stop - req.prefix_len) // 4) * 4)
        assert slots is not None
        req.owned.append(slots)
        yield lambda stop=stop: coordinator.claimed(req, stop)
        req.prefix_len = stop
        harness.settle()
        yield lambda: coordinator.poll([req.rid])
    yield lambda: coordinator.reclaim(BLOCK)
    yield lambda: coordinator.release(req.rid)


def _run_with(bomb: Bomb) -> None:
    harness, req = CoordinatorHarness(), req_of(6.5)
    try:
        keys = harness.fill(req.origin_input_ids, {3, 4, 5})
        harness.open(*keys)
        for step in _steps(harness, req):
            sys.setprofile(bomb)
            try:
                step()
            except Fault:
                sys.setprofile(None)
                harness.coordinator.release(req.rid)  # what the boundary does
            finally:
                sys.setprofile(None)
            owned = sum(len(each) for each in req.owned)
            free = harness.allocator.available_size()
            assert owned + free + harness.coordinator.reclaimable_tokens == harness.size, bomb.where
        for slots in req.owned:
            harness.allocator.free(slots)
        harness.settle()
        harness.coordinator.poll([])
        harness.settle()
        if "discard" not in bomb.where:  # that is what gives them back
            assert harness.coordinator.reclaimable_tokens == 0, bomb.where
            assert harness.allocator.available_size() == harness.size, bomb.where
    finally:
        harness.close()


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.breadth)])
def test_boundary_any_failing_call_loses_no_slot(every: bool) -> None:
    """SGLang's leak check would see it: free, owned and held slots are all slots, at any time.

    The first and the last call from each line, or every call.
    """
    bomb = Bomb(0)
    _run_with(bomb)
    ends = {number for calls in bomb.places.values() for number in (calls[0], calls[-1])}
    assert len(bomb.places) > 200
    for number in range(1, bomb.calls + 1) if every else sorted(ends):
        _run_with(Bomb(number))
