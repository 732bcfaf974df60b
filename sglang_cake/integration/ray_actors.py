"""The schedulers of a server with `--use-ray`. Importing this module needs Ray.

SGLang's actors load no plugins, and a worker of Ray has the environment of its node, not that of
the launching process. Actors of our own do both before SGLang's part begins.
"""

from typing import Any

import ray
from sglang.srt.plugins import load_plugins
from sglang.srt.ray import engine
from sglang.srt.ray.scheduler_actor import SchedulerActor as SglangActor

from sglang_cake.integration import flags


class SchedulerActor(SglangActor.__ray_actor_class__):
    """SGLang's actor, with plugins if the server has cake. Ray's workers import it by name."""

    def __init__(self, server_args: Any, **kwargs: Any) -> None:
        if flags.enable_in_ray_worker(server_args):
            load_plugins()
        super().__init__(server_args, **kwargs)


def install() -> None:
    """Let every engine of this process that uses Ray create these actors."""
    engine.SchedulerActor = ray.remote(SchedulerActor)
