"""The entry point of group `sglang.srt.plugins`: SGLang calls `register` once in every process."""

import sys
from functools import partial
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

from sglang_cake.core.errors import ConfigError
from sglang_cake.integration import flags
from sglang_cake.integration.boundary import register as register_hook

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_ENGINE_MODULE = "sglang.srt.entrypoints.engine"


def register() -> None:
    """Register the hooks for cake's flags; in a child of a server with cake, all other hooks too.

    SGLang logs and ignores exceptions raised here, so no setting is checked here.
    """
    register_hook(f"{_SERVER_ARGS}.add_cli_args", flags.add_flags, HookType.AFTER)
    around = partial(register_hook, kind=HookType.AROUND, passes=ConfigError)
    around(f"{_SERVER_ARGS}.from_cli_args", flags.from_cli_args)
    around(f"{_SERVER_ARGS}.resolve_once", flags.resolve_once)
    _accept_engine_keywords()
    if flags.is_enabled_child():
        # Imported here since these imports are heavy, and a server without cake must not change.
        from sglang.srt.mem_cache.registry import register_radix_cache_backend

        from sglang_cake.integration import response_stats
        from sglang_cake.integration.identity import weight_hooks
        from sglang_cake.integration.overlap import forward_hook
        from sglang_cake.integration.request import media
        from sglang_cake.integration.scheduler import scheduler_hooks

        register_radix_cache_backend(flags.BACKEND, _build)
        scheduler_hooks.install()
        weight_hooks.install()
        forward_hook.install()
        media.install()
        response_stats.install()


def _build(ctx: "TreeCacheBuildContext") -> "BasePrefixCache":
    from sglang_cake.integration.build import build

    return build(ctx)


def _accept_engine_keywords() -> None:
    """Replace the class attribute through which `Engine` makes its ServerArgs. It is there for
    forks to replace.

    `Engine.__init__` loads the plugins first, so its module is imported in a process with an
    engine. In other processes it is not imported here.
    """
    module = sys.modules.get(_ENGINE_MODULE)
    engine = getattr(module, "Engine", None)
    if engine is None:  # not imported, or being imported
        return
    original = engine.server_args_class
    engine.server_args_class = staticmethod(lambda **kwargs: flags.engine_args(original, **kwargs))
