"""Launches of kernels in a simulation, and the hooks on Triton's functions that make them.

Within a simulation ``kernel[grid](...)`` goes to the schedule. Kernels that were defined to be
compiled are interpreted too, so a program need not be told of a check when it imports Triton.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import autotuner, interpreter, jit
from triton.runtime.interpreter import InterpretedFunction

from taxfree_check.checker.clocks import Actor

_DEFAULT_WARPS = 4


@dataclass(eq=False)
class RunningLaunch:
    """One launch, as the simulation runs it.

    Args:
        request: the launch as it was asked for.
        host: the actor that launches it.
        weight: of its programs, for the scheduler.
        before: the launch before it, if this one may start before that has ended.
    """

    request: Request
    host: Actor
    weight: int
    before: RunningLaunch | None = None
    begun: np.ndarray = field(init=False)  # clocks before it
    ended: np.ndarray = field(init=False)  # clocks after the programs that have ended
    next_program: int = 0
    running: int = 0
    ready: int = 0  # programs that have called gdc_launch_dependents

    def __post_init__(self) -> None:
        self.begun, self.ended = self.host.clocks.copy(), self.host.clocks.copy()
        self.function, self.grid = self.request.function, self.request.grid
        self.programs = self.grid[0] * self.grid[1] * self.grid[2]
        self.arguments = self.request.program_arguments()

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    def index_of(self, program: int) -> tuple[int, int, int]:
        """The three program ids of a program; the first one counts fastest."""
        x, y, _ = self.grid
        return program % x, program // x % y, program // (x * y)

    def name_of(self, program: int) -> str:
        """The name of a program, for reports."""
        index = self.index_of(program)
        shown: Any = program if self.grid[1:] == (1, 1) else index[: 3 if self.grid[2] > 1 else 2]
        return f"program {shown} of {self.name}"

    @property
    def first_slot(self) -> int:
        """First slot of its programs: beside the slots of a launch that may still be running."""
        if self.before is None or self.before.first_slot >= self.programs:
            return 0
        return self.before.end_slot

    @property
    def end_slot(self) -> int:
        return self.first_slot + self.programs

    @property
    def has_started(self) -> bool:
        """Whether all of its programs have."""
        return self.next_program == self.programs

    @property
    def has_ended(self) -> bool:
        return self.has_started and self.running == 0

    @property
    def has_launched_dependents(self) -> bool:
        """Whether the next launch may begin: all programs let it, or have ended."""
        return self.ready == self.programs or self.has_ended


@dataclass(frozen=True)
class Request:
    """A launch as it was asked for.

    Args:
        function: the interpreted kernel.
        grid: programs in each dimension.
        given: its arguments by name; launch options have been removed.
        constants: those that are constexprs.
        warps: of each program.
    """

    function: Any
    grid: tuple[int, int, int]
    given: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int

    def program_arguments(self) -> dict[str, Any]:
        """The arguments as the interpreter gives them to each program."""
        return {
            name: value if name in self.constants else interpreter._implicit_cvt(value)
            for name, value in self.given.items()
        }


@contextlib.contextmanager
def launched_through(
    launch: Callable[[Request], None], refuse: Callable[[str], None], seed: int
) -> Iterator[None]:
    """Within the context, launches go to `launch`; autotuned kernels take a config by `seed`.

    Args:
        refuse: gets what kernels cannot be interpreted.
    """

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if _is_gluon(self):
            refuse(
                f"{self.__name__}: a Gluon kernel, whose layouts and shared memory have no "
                "interpreter"
            )
        elif not warmup:
            function = interpreted(self)
            builtins.replace_in(function.fn.__globals__)
            launch(_request(function, args, grid, named))

    def tuned(self: Any, *args: Any, **named: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(named)
        config = Random(f"{self.base_fn.__name__} {seed}").choice(configs)
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **named, **config.all_kwargs()})
        return self.fn.run(*args, **named, **config.all_kwargs())

    def call(self: Any, *args: Any, **named: Any) -> Any:
        function = interpreted(self)
        builtins.replace_in(function.fn.__globals__)
        return call_interpreted(function, *args, **named)

    call_interpreted = InterpretedFunction.__call__
    replaced: list[tuple[Any, str, Any]] = [
        (InterpretedFunction, "run", run),
        (InterpretedFunction, "__call__", call),
        (jit.JITFunction, "run", run),
        (jit.JITFunction, "__call__", call),
        (jit.JITFunction, "__get__", _bind),
        (autotuner.Autotuner, "run", tuned),
    ]
    builtins = _Builtins()
    with contextlib.ExitStack() as stack:
        stack.callback(builtins.restore)
        for kind, name, function in replaced:
            stack.enter_context(mock.patch.object(kind, name, function, create=True))
        yield


def _bind(self: Any, aggregate: Any, kind: Any = None) -> Any:
    """A method of an aggregate; the compiler binds it, the interpreter would not."""
    return self if aggregate is None else partial(self, aggregate)


class _Builtins:
    """Triton's functions that modules know by names of their own: interpreted for a while.

    The interpreter finds those only that are members of ``triton.language``.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._originals: list[tuple[dict[str, Any], str, Any]] = []

    def replace_in(self, names: dict[str, Any]) -> None:
        """Replace those among a module's names."""
        if id(names) in self._known:
            return
        self._known.add(id(names))
        builtins = [
            (name, builtin)
            for name, builtin in names.items()
            if tl.core.is_builtin(builtin) and builtin.__module__.startswith("triton.language")
        ]
        for name, function in builtins:
            self._originals.append((names, name, function))
            names[name] = partial(_interpret, function)

    def restore(self) -> None:
        for names, name, function in self._originals:
            names[name] = function


def _interpret(function: Any, *args: Any, **named: Any) -> Any:
    semantic = {"_semantic": interpreter.interpreter_semantic}
    return function(*args, **(named | semantic))


def interpreted(function: Any) -> Any:
    """A device function, interpreted."""
    return function if isinstance(function, InterpretedFunction) else _interpreted(function.fn)


@cache
def _interpreted(function: Any) -> InterpretedFunction:
    return InterpretedFunction(function)


def _is_gluon(function: Any) -> bool:
    return type(function).__module__.startswith("triton.experimental.gluon")


def is_device_function(function: Any) -> bool:
    """Whether a value is a device function of Triton."""
    return isinstance(function, InterpretedFunction | jit.JITFunction)


def _request(function: Any, args: tuple[Any, ...], grid: Any, named: dict[str, Any]) -> Request:
    warps = named.get("num_warps", _DEFAULT_WARPS)
    named = {name: value for name, value in named.items() if name in function.arg_names}
    arguments = inspect.getcallargs(function.rewrite(), *args, **named)
    constants = {name: arguments[name] for name in _constexprs(function)}
    if callable(grid):
        grid = grid(arguments)
    x, y, z = (*(int(size) for size in grid), 1, 1)[:3]
    return Request(function, (x, y, z), arguments, constants, warps)


@cache
def _constexprs(function: Any) -> tuple[str, ...]:
    """Names of the arguments of a kernel that are constants."""
    executor = interpreter.GridExecutor(function.rewrite(), function.arg_names, (1,))
    return tuple(executor.constexprs)
