"""Anybody's kernels executed: ranks as AMD GPUs, whose machine code this process runs."""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from taxfree_check.checker.ranks import Allocator, Symmetric
from taxfree_check.executed.caches import GpuMemory
from taxfree_check.executed.errors import Hang
from taxfree_check.executed.run import (
    DEVICES,
    MOST_INSTRUCTIONS,
    NEVER,
    ExecutedCall,
    Host,
    Session,
)
from taxfree_check.executed.tactics import Tactics
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import Kernel


class ExecutedWorld(Allocator):
    """Ranks with symmetric memory, like :class:`taxfree.check.World`, for one run by one seed.

    Kernels are compiled for an AMD GPU and their machine code is executed, all ranks at once.
    Triton's driver of this process is replaced.

    Args:
        ranks: how many there are.
        seed: draws the order of waves, how late accesses take effect, and how long caches keep
            lines.
        architecture: "gfx942" or "gfx950".
        most_instructions: of all waves of a run; more is a hang.

    Attributes:
        runs: what the runs showed.
        heap_bases: int64 [ranks], where each rank's memory begins.
    """

    def __init__(
        self,
        ranks: int,
        seed: int = 0,
        architecture: str = "gfx942",
        most_instructions: int = MOST_INSTRUCTIONS,
    ) -> None:
        self.ranks, self.seed, self.architecture = ranks, seed, architecture
        self._session = _Session(ranks, seed, architecture, most_instructions)
        self.runs: list[ExecutedCall] = []
        self._made: list[list[torch.Tensor]] = []

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, name: str = ""
    ) -> Symmetric:
        """A symmetric tensor; its bytes are 0xFF, NaN in every floating-point type."""
        memory = self._session.memory
        blocks = [
            memory.empty(math.prod(shape), dtype, rank).view(*shape) for rank in range(self.ranks)
        ]
        for block in blocks:
            block.view(torch.uint8).fill_(0xFF)
        return Symmetric(blocks, name)

    def run(
        self,
        call: Callable[..., object],
        calls: int | None = None,
        *,
        barrier: bool = False,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Run calls on all ranks; arguments as of :meth:`taxfree.check.World.run`.

        There are 3 calls where `calls` is None.

        Raises:
            AssertionError: memory holds a wrong result.
            Hang: waves, or ranks, wait for what does not happen.
            UnknownInstruction: the executor does not know an instruction, which it names.
            ExecutionError: an access is outside of all tensors.
        """
        name, of_rank = getattr(call, "__name__", "run"), self.of_rank(call, barrier)
        shown = self._session.run_calls(name, of_rank, 3 if calls is None else calls)
        self.runs.append(shown)
        if check is not None:
            check()

    def barrier(self) -> None:
        """In a call: wait until all hosts have come here; their devices are idle."""
        _host().stop()


class _Session(Session):
    """The memory and GPUs of a world, and one run of calls at a time."""

    def __init__(self, ranks: int, seed: int, architecture: str, most: int) -> None:
        tactics = Tactics.drawn(Random(seed))
        self._of = architecture, seed, tactics, most
        super().__init__(self._shown_of(""), KNOWN[DEVICES[architecture]], most, NEVER, tactics)
        self.memory = self._memory = self.new_memory()
        self._gpus = [GpuMemory(self.memory) for _ in range(ranks)]

    def _shown_of(self, name: str) -> ExecutedCall:
        architecture, seed, *_ = self._of
        nothing: Any = None  # of no operation
        return ExecutedCall("", name, nothing, {}, architecture, seed)

    def run_calls(self, name: str, of_rank: Callable[[int, int], None], calls: int) -> ExecutedCall:
        self._shown = shown = self._shown_of(name)
        self._waiting: list[_WorldHost] = []
        begin, compiled = time.perf_counter(), self.compiling
        numbers = range(calls)
        hosts = [
            _WorldHost(rank, [partial(of_rank, rank, number) for number in numbers])
            for rank in range(len(self._gpus))
        ]
        try:
            with np.errstate(all="ignore"), _launches_are_executed():
                self._execute(hosts)
        finally:
            for host in hosts:
                host.abandon()
        if self._waiting:
            ranks = ", ".join(str(host.rank) for host in self._waiting)
            raise Hang(f"ranks {ranks} wait at a barrier that others do not come to")
        shown.seconds = time.perf_counter() - begin - (self.compiling - compiled)
        return shown

    def _take(self, host: Host) -> None:
        assert isinstance(host, _WorldHost)
        if not host.is_at_barrier:
            super()._take(host)
            return
        self._waiting.append(host)
        if len(self._waiting) == len(self._gpus):
            waiting, self._waiting = self._waiting, []
            for host in waiting:
                host.go_on()
                self._take(host)

    def _compare(self, call: int) -> None:
        """Who calls compares."""


class _WorldHost(Host):
    """Runs a rank's calls; it stops at launches and at barriers."""

    is_at_barrier = False

    def run(self) -> None:
        _present.host = self
        super().run()

    def stop(self) -> None:
        """Wait until all hosts have come here."""
        self.is_at_barrier = True
        self.pause()
        self.is_at_barrier = False


_present = threading.local()


def _host() -> _WorldHost:
    host: _WorldHost = _present.host
    return host


@contextmanager
def _launches_are_executed() -> Iterator[None]:
    """Within the context, launches of hosts go to the session."""
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if warmup or not hasattr(_present, "host"):
            return launch(self, *args, grid=grid, warmup=warmup, **named)
        arguments = {name: value for name, value in named.items() if name in self.arg_names}
        options = {name: value for name, value in named.items() if name not in self.arg_names}
        bound = inspect.signature(self.fn).bind(*args, **arguments)
        bound.apply_defaults()
        shape = grid(bound.arguments | options) if callable(grid) else grid
        constant = {parameter.name for parameter in self.params if parameter.is_constexpr}
        constants = {name: value for name, value in bound.arguments.items() if name in constant}
        values = [value for name, value in bound.arguments.items() if name not in constant]
        Kernel(self, tuple(shape), constants, options)(*values)  # type: ignore[arg-type]
        return None

    with mock.patch.object(JITFunction, "run", run):
        yield
