"""The boundary between SGLang and cake: no exception of cake crosses it.

SGLang calls cake in two ways: through hooks, which `register` enters into SGLang's registry, and
through methods of our classes, which are `guarded`. The same rules hold for both:

- An exception of ours is counted and logged, with its traceback once for each hook and type.
- The request that it concerns is computed without cake, and SGLang keeps its own result.
- If failures repeat, or if the state after one cannot be trusted, cake is switched off for the life
  of the process.
- Exceptions of SGLang's own code pass, and so do KeyboardInterrupt and SystemExit.
"""

import functools
import logging
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_cake.integration.compat import apply_last_hook, registered_hooks

if TYPE_CHECKING:
    from sglang_cake.integration.metrics import FailureMetrics

logger = logging.getLogger("sglang_cake")

F = TypeVar("F", bound=Callable[..., Any])

# SGLang sets this variable if it has metrics. prometheus_client must not be imported before that.
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
# Cake is switched off after MOST_FAILURES failures among AMONG_REQUESTS requests.
MOST_FAILURES = 3
AMONG_REQUESTS = 1000


class Health:
    """Decides whether there are too many failures. Not thread-safe."""

    def __init__(self) -> None:
        self._requests = 0
        # For each of the last failures, the number of requests that had arrived before it.
        self._failures: deque[int] = deque(maxlen=MOST_FAILURES)

    def arrived(self) -> None:
        """A request has arrived."""
        self._requests += 1

    def failed(self) -> bool:
        """A failure has happened. Returns whether there are too many now."""
        self._failures.append(self._requests)
        full = len(self._failures) == MOST_FAILURES
        return full and self._requests - self._failures[0] < AMONG_REQUESTS


class FailureHandler(Protocol):
    """Ends what cake does for requests: `CakeRadixCache`."""

    def forget(self, rid: str | None) -> None: ...
    def switch_off(self) -> None: ...


class Boundary:
    """Handles the exceptions of cake in this process. A process runs at most one scheduler.

    Attributes:
        hooks: our functions that SGLang calls, by the name of the place.
        counts: failures by the same name.
        off: whether cake is switched off.
        unsafe_hook_called: an unsafe hook was called since the last reset of this flag.
    """

    def __init__(self) -> None:
        self.hooks: defaultdict[str, list[Callable[..., Any]]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.health = Health()
        self.off = False
        self.unsafe_hook_called = False
        self._handler: FailureHandler | None = None
        self._counter: FailureMetrics | None = None
        self._logged: set[tuple[str, type]] = set()

    def set_handler(self, handler: FailureHandler, counter: "FailureMetrics | None") -> None:
        """From now on `handler` handles failures, and `counter` publishes them."""
        self.health = Health()
        self._handler = handler
        self._counter = counter
        if self.off:  # an unsafe hook failed before, so it is unknown what was loaded
            self._switch_off(handler)

    def failed(
        self, hook: str, error: Exception, *, rid: str | None = None, unsafe: bool = False
    ) -> None:
        """Count, log and handle an exception of ours. Raises nothing.

        Args:
            rid: the request that it concerns; None: it may concern any.
            unsafe: after it, what cake would load or store cannot be trusted.
        """
        try:
            self._report(hook, error)
            self._contain(rid, off=unsafe or self.health.failed())
        except Exception:
            logger.exception("cake: a failure in %s could not be contained", hook)

    def _report(self, hook: str, error: Exception) -> None:
        self.counts[hook] += 1
        if (hook, type(error)) not in self._logged:
            self._logged.add((hook, type(error)))
            logger.error("cake: %s failed; SGLang goes on without it", hook, exc_info=error)
        if self._counter is None and _MULTIPROCESS in os.environ:  # not a scheduler process
            from sglang_cake.integration.metrics import FailureMetrics

            self._counter = FailureMetrics({}, ())
        if self._counter is not None:
            self._counter.failed(hook)

    def _contain(self, rid: str | None, *, off: bool) -> None:
        handler = self._handler
        if handler is None:
            self.off |= off
        if handler is None or self.off:
            return
        if not off:
            try:
                handler.forget(rid)
            except Exception:
                logger.exception("cake: a request could not be given up")
                off = True
        if off:
            self._switch_off(handler)

    def _switch_off(self, handler: FailureHandler) -> None:
        self.off = True
        logger.error(
            "cake is switched off: it failed %d times; SGLang goes on without it until the server "
            "is started again",
            self.counts.total(),
        )
        if self._counter is not None:
            self._counter.switched_off()
        handler.switch_off()


BOUNDARY = Boundary()


def guarded(name: str, default: object = None, *, unsafe: bool = False) -> Callable[[F], F]:
    """Decorator of a method, or of a part of one, that SGLang calls. If it raises, the exception is
    handled by the boundary, and `default` is returned. The exception concerns the request of the
    first argument that has a `rid`.

    Args:
        name: the key in `Boundary.hooks`.
        unsafe: see `Boundary.failed`.
    """

    def guard(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                BOUNDARY.failed(name, error, rid=_rid(args), unsafe=unsafe)
                return default

        BOUNDARY.hooks[name].append(call)
        return cast(F, call)

    return guard


def register(
    function: str,
    hook: Callable[..., Any],
    kind: HookType,
    *,
    unsafe: bool = False,
    passes: type[Exception] | tuple[()] = (),
) -> None:
    """Register a hook with SGLang, behind the boundary. All hooks are registered here.

    Args:
        function: dotted name of SGLang's function.
        unsafe: see `Boundary.failed`.
        passes: exceptions that the hook raises on purpose, for the caller of SGLang's function.
    """
    name = ".".join(function.split(".")[-2:])

    @functools.wraps(hook)
    def guarded_hook(*args: Any, **kwargs: Any) -> Any:
        original: OriginalFunction | None = None
        if kind is HookType.AROUND:
            original = OriginalFunction(args[0])
            args = (original, *args[1:])
        BOUNDARY.unsafe_hook_called |= unsafe
        try:
            return hook(*args, **kwargs)
        except passes:
            raise
        except Exception as error:
            if original is not None and original.error is error:
                raise
            BOUNDARY.failed(name, error, rid=_rid(args), unsafe=unsafe)
        if original is None:
            return None  # SGLang's registry keeps the previous arguments or result
        if original.error is not None:
            raise original.error
        return original.result if original.called else original(*args[1:], **kwargs)

    BOUNDARY.hooks[name].append(guarded_hook)
    HookRegistry.register(function, guarded_hook, kind)


def register_and_apply(function: str, hook: Callable[..., Any], kind: HookType) -> None:
    """`register` after SGLang has applied the hooks of all plug-ins: the hook is applied at once.
    If the function has a hook of ours, nothing happens."""
    name = ".".join(function.split(".")[-2:])
    if not any(each in BOUNDARY.hooks[name] for each in registered_hooks(function)):
        register(function, hook, kind)
        apply_last_hook(function)


class OriginalFunction:
    """SGLang's own function as an AROUND hook gets it.

    Attributes:
        called: whether it was called.
        result: the result of the last call.
        error: what the last call raised, or None.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.result: Any = None
        self.called = False
        self.error: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        self.error = None
        try:
            self.result = self._function(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise
        return self.result


def _rid(args: tuple[Any, ...]) -> str | None:
    for each in args:
        rid = getattr(each, "rid", None)
        if isinstance(rid, str):
            return rid
    return None
