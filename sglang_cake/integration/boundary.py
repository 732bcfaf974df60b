"""The boundary between SGLang and cake: no exception of cake crosses it.

SGLang calls cake in two ways: through hooks, which `register` puts into SGLang's registry, and
through methods of cake's classes, which are `guarded`. The same rule holds for both. An exception
of cake is counted and logged (its traceback once for each place and type), the request that it
concerns is computed without cake, and SGLang goes on with its own result. If failures repeat, or if
one leaves a state that cannot be trusted, cake is switched off for the life of the process.
Exceptions of SGLang's own code pass, and so do KeyboardInterrupt and SystemExit.
"""

import functools
import logging
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

logger = logging.getLogger("sglang_cake")

F = TypeVar("F", bound=Callable[..., Any])

# SGLang sets it in processes with metrics. The Prometheus client must not be imported before.
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
MOST_FAILURES = 3  # so many of them ...
AMONG_REQUESTS = 1000  # ... among so many requests, and cake is switched off


class Health:
    """Decides whether failures are too many. Not thread-safe."""

    def __init__(self) -> None:
        self._requests = 0
        self._failures: deque[int] = deque(maxlen=MOST_FAILURES)  # requests seen before each

    def arrived(self) -> None:
        """One more request has come."""
        self._requests += 1

    def failed(self) -> bool:
        """One more failure. Returns whether there are too many."""
        self._failures.append(self._requests)
        full = len(self._failures) == MOST_FAILURES
        return full and self._requests - self._failures[0] < AMONG_REQUESTS


class Owner(Protocol):
    """The holder of cake's state in a scheduler process: the tree."""

    def forget(self, rid: str) -> None:
        """Compute this request without cake, and return all that it holds."""
        ...

    def forget_all(self) -> None:
        """The same for every request."""
        ...

    def switch_off(self) -> None:
        """The same, and from now on no request is looked up and no block is stored."""
        ...


class Meter(Protocol):
    """Publishes failures."""

    def failed(self, hook: str) -> None:
        """A hook has failed once more."""
        ...

    def switched_off(self) -> None:
        """Cake is off for the life of the process."""
        ...


class Boundary:
    """The exceptions of this process. One scheduler runs in a process.

    Attributes:
        hooks: the functions that SGLang calls, by the name of the place.
        counts: failures by place.
        off: cake is switched off.
        touched: an unsafe hook was called since this was reset.
    """

    def __init__(self) -> None:
        self.hooks: defaultdict[str, list[Callable[..., Any]]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.health = Health()
        self.off = False
        self.touched = False
        self._owner: Owner | None = None
        self._meter: Meter | None = None
        self._logged: set[tuple[str, type]] = set()

    def watch(self, owner: Owner, meter: Meter | None) -> None:
        """From now on `owner` gives requests up, and `meter` publishes failures."""
        self.health = Health()
        self._owner = owner
        self._meter = meter
        if self.off:  # a hook failed before there was an owner: what was loaded is not known
            self._switch_off(owner)

    def failed(
        self, hook: str, error: Exception, *, rid: str | None = None, unsafe: bool = False
    ) -> None:
        """Count, log and contain an exception of cake. Raises nothing.

        Args:
            rid: the request that it concerns; None: any.
            unsafe: KV that cake would load or store after it cannot be trusted.
        """
        try:
            self._publish(hook, error)
            self._contain(rid, off=unsafe or self.health.failed())
        except Exception:
            logger.exception("cake: a failure in %s could not be contained", hook)

    def _publish(self, hook: str, error: Exception) -> None:
        self.counts[hook] += 1
        if (hook, type(error)) not in self._logged:
            self._logged.add((hook, type(error)))
            logger.error("cake: %s failed; SGLang goes on without it", hook, exc_info=error)
        if self._meter is None and _MULTIPROCESS in os.environ:  # not a scheduler's process
            from sglang_cake.integration.metrics import FailureMetrics

            self._meter = FailureMetrics({}, ())
        if self._meter is not None:
            self._meter.failed(hook)

    def _contain(self, rid: str | None, *, off: bool) -> None:
        owner = self._owner
        if owner is None:
            self.off |= off
        if owner is None or self.off:
            return
        if not off:
            try:
                if rid is None:
                    owner.forget_all()
                else:
                    owner.forget(rid)
            except Exception:
                logger.exception("cake: a request could not be given up")
                off = True
        if off:
            self._switch_off(owner)

    def _switch_off(self, owner: Owner) -> None:
        self.off = True
        logger.error(
            "cake is switched off: it failed %d times; SGLang goes on without it until the server "
            "is started again",
            self.counts.total(),
        )
        if self._meter is not None:
            self._meter.switched_off()
        owner.switch_off()


BOUNDARY = Boundary()


def guarded(name: str, default: object = None, *, unsafe: bool = False) -> Callable[[F], F]:
    """Marks a method of cake that SGLang calls, or a part of one. Its exceptions are contained, and
    it returns `default` then. The first argument with a `rid` is the request that it concerns.

    Args: unsafe: as of `Boundary.failed`.
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
    target: str,
    hook: Callable[..., Any],
    kind: HookType,
    *,
    unsafe: bool = False,
    passes: type[Exception] | tuple[()] = (),
) -> None:
    """Register a hook with SGLang, behind the boundary. The only way to register one.

    Args:
        unsafe: as of `Boundary.failed`.
        passes: exceptions that the hook raises on purpose, for SGLang's caller.
    """
    name = ".".join(target.split(".")[-2:])

    def failed(error: Exception, args: tuple[Any, ...]) -> None:
        BOUNDARY.failed(name, error, rid=_rid(args), unsafe=unsafe)

    @functools.wraps(hook)
    def beside(*args: Any, **kwargs: Any) -> Any:
        BOUNDARY.touched |= unsafe
        try:
            return hook(*args, **kwargs)
        except passes:
            raise
        except Exception as error:
            failed(error, args)
            return None  # SGLang's registry keeps SGLang's own result

    @functools.wraps(hook)
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plain = Plain(original)
        BOUNDARY.touched |= unsafe
        try:
            return hook(plain, *args, **kwargs)
        except passes:
            raise
        except Exception as error:
            if plain.error is error:
                raise
            failed(error, args)
            return plain.outcome() if plain.called else original(*args, **kwargs)

    behind = around if kind is HookType.AROUND else beside
    BOUNDARY.hooks[name].append(behind)
    HookRegistry.register(target, behind, kind)


class Plain:
    """SGLang's own function behind an AROUND hook. Remembers its last result or exception."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._result: Any = None
        self.called = False
        self.error: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        self.error = None
        try:
            self._result = self._function(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise
        return self._result

    def outcome(self) -> Any:
        """Return the result of the last call, or raise its exception."""
        if self.error is not None:
            raise self.error
        return self._result


def _rid(args: tuple[Any, ...]) -> str | None:
    for each in args:
        rid = getattr(each, "rid", None)
        if isinstance(rid, str):
            return rid
    return None
