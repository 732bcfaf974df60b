"""An actor of Ray has the settings of its launcher, not those of its node. Ray is replaced."""

import os
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_cake.config import CHILD_OF_CAKE, CakeConfig
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration import flags

NODE = {"SGLANG_CAKE_STORE": "file:///node", "SGLANG_CAKE_CONFIG": "/node.toml", "HOME": "/home"}
ENGINE = "sglang.srt.ray.engine"
ACTORS = "sglang_cake.integration.ray_actors"


@pytest.fixture
def ray_actors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with a Ray that keeps the class of an actor, and an engine without anything."""
    ray = ModuleType("ray")
    ray.remote = lambda cls: SimpleNamespace(__ray_actor_class__=cls)  # type: ignore[attr-defined]
    engine = ModuleType(ENGINE)
    engine.RayEngine = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, ENGINE, engine)
    for name in ("sglang.srt.ray", "sglang.srt.ray.scheduler_actor", ACTORS):
        monkeypatch.setitem(sys.modules, name, None)  # what is imported now does not stay
        del sys.modules[name]
    return import_module(ACTORS)


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch, ray_actors: Any) -> list[Any]:
    """What happens when an actor is created: the environment when plugins are loaded, and the
    arguments of SGLang's part."""
    found: list[Any] = []
    monkeypatch.setattr(os, "environ", dict(NODE))
    monkeypatch.setattr(ray_actors, "load_plugins", lambda: found.append(dict(os.environ)))
    base = ray_actors.SchedulerActor.__base__
    monkeypatch.setattr(base, "__init__", lambda self, *args, **more: found.append((args, more)))
    return found


def test_ray_actor_loads_plugins_with_the_settings_of_the_launcher(
    ray_actors: Any, created: list[Any]
) -> None:
    record = SimpleNamespace(_cake_config=CakeConfig(mode="load", queue_depth=7))
    ray_actors.SchedulerActor(server_args=record, tp_rank=1)
    environment, arguments = created
    assert environment.items() >= (NODE | {"SGLANG_CAKE_ENABLED": CHILD_OF_CAKE}).items()
    config = flags.settings_of(record)
    assert (config.mode, config.queue_depth, config.store) == ("load", 7, None)
    assert arguments == ((record,), {"tp_rank": 1})


def test_ray_actor_of_a_server_without_cake_is_that_of_sglang(
    ray_actors: Any, created: list[Any]
) -> None:
    record = SimpleNamespace()
    ray_actors.SchedulerActor(server_args=record, tp_rank=1)
    assert created == [((record,), {"tp_rank": 1})]
    assert os.environ.items() >= NODE.items()
    assert "SGLANG_CAKE_ENABLED" not in os.environ


def test_ray_engine_creates_actors_with_plugins(ray_actors: Any) -> None:
    ray_actors.install()
    assert sys.modules[ENGINE].SchedulerActor.__ray_actor_class__ is ray_actors.SchedulerActor


def test_scheduler_whose_server_args_nobody_resolved_is_refused() -> None:
    with pytest.raises(ConfigError, match="no settings of cake: call their resolve_once"):
        flags.settings_of(SimpleNamespace())
