"""Calls in which one rank dies, stops, or comes late."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import HashStore

from taxfree_kernels.errors import PeerTimeout
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, launch_normally, launching_through
from tests.kernels.tasks import Case, Inputs, private


def call_with_a_fault(
    fabric: Fabric, case: Case, kind: signal.Signals, phase: str, bound_s: float
) -> dict[str, Any]:
    """A right call, then two in one of which the last rank sends itself a signal.

    Args:
        kind: SIGKILL or SIGSTOP.
        phase: of the two calls: "before" the rank has signalled any peer, "during" its sends, or
            "after" them, before those of the second call.
        bound_s: of waits.
    """
    plan, inputs = case.plan(fabric), Inputs(fabric, case, seed=1, integers=True)
    found: dict[str, Any] = {"before": _is_right(inputs, inputs.run(plan)), "calls": []}
    fabric.pool.bound_waits(bound_s)
    if fabric.rank == fabric.world_size - 1:
        if phase == "after":
            inputs.run(plan)
            fabric.synchronize()
        interrupted = _interrupted if fabric.backend == "interpreter" else _cut_short
        with interrupted(fabric, int(phase == "during"), lambda: os.kill(os.getpid(), kind)):
            inputs.run(plan)
        return found
    for _ in range(2):
        begin = time.monotonic()
        out = inputs.run(plan)
        error = _error(fabric)
        seconds = time.monotonic() - begin
        found["calls"].append((_is_right(inputs, out), error, seconds))
        if error is not None:
            break
    return found


def call_again(fabric: Fabric, case: Case) -> bool:
    """Reset, and call three times: whether all is well."""
    fabric.pool.bound_waits(30.0)  # a busy machine is no fault
    plan, inputs = case.plan(fabric), Inputs(fabric, case, seed=2, integers=True)
    right = [_is_right(inputs, inputs.run(plan)) for _ in range(3)]
    return all(right) and _error(fabric) is None


def call_with_a_late_rank(
    fabric: Fabric, case: Case, late_s: float, bound_s: float
) -> tuple[bool, str | None, float, bool]:
    """The last rank comes late: whether the call is right, its error and time, and a later call."""
    with private(fabric) as own:
        plan, inputs = case.plan(own), Inputs(own, case, seed=1, integers=True)
        inputs.run(plan)
        own.pool.bound_waits(bound_s)
        if own.rank == own.world_size - 1:
            time.sleep(late_s)
        begin = time.monotonic()
        out = inputs.run(plan)
        error = _error(own)
        seconds = time.monotonic() - begin
        own.barrier()
        return _is_right(inputs, out), error, seconds, call_again(own, case)


def call_on_after_the_bound(
    fabric: Fabric, case: Case, late_s: float, bound_s: float
) -> tuple[list[bool], str | None, str | None]:
    """Four calls without a look, the last rank late: which are right, and two checks' errors."""
    with private(fabric) as own:
        calls = [Inputs(own, case, seed=seed, integers=True) for seed in range(4)]
        plan = case.plan(own)
        calls[0].run(plan)
        own.pool.bound_waits(bound_s)
        if own.rank == own.world_size - 1:
            time.sleep(late_s)
        outs = [inputs.run(plan) for inputs in calls]
        right = [_is_right(inputs, out) for inputs, out in zip(calls, outs, strict=True)]
        own.barrier()
        return right, _error(own), _error(own, at_rest=True)


def be_busy(fabric: Fabric, folder: Path) -> None:
    """Leave a mark, and do not come back."""
    (folder / str(fabric.rank)).touch()
    time.sleep(60)


def fail(fabric: Fabric, message: str) -> None:
    """Raise on every rank."""
    raise RuntimeError(message)


def _is_right(inputs: Inputs, out: Any) -> bool:
    return bool((out == inputs.exact.to(out.dtype)).all())


def _error(fabric: Fabric, at_rest: bool = False) -> str | None:
    fabric.synchronize()
    try:
        fabric.pool.check_at_rest() if at_rest else fabric.pool.check()
    except PeerTimeout as error:
        return error.message
    return None


@contextlib.contextmanager
def _interrupted(fabric: Fabric, messages: int, interrupt: Callable[[], Any]) -> Iterator[None]:
    """Within the context, do something once, before the next message after so many to peers.

    A message is a signal, or a store of words.
    """
    from triton.runtime import interpreter

    builder, ir = interpreter.interpreter_builder, interpreter._ir
    atomic, store, sent = builder.create_atomic_rmw, builder.create_masked_store, 0
    own, pool = int(fabric.heap_bases[fabric.rank]), fabric.pool
    blocks = (pool.ll_packets, pool.lamport_words)
    places = [(each.data_ptr() - own, each.nbytes) for each in blocks]
    words = [
        range(base + offset, base + offset + size)
        for base in fabric.heap_bases.tolist()
        for offset, size in places
        if base != own
    ]

    def send() -> None:
        nonlocal sent
        if sent == messages:
            interrupt()
        sent += 1

    def create_atomic_rmw(op: Any, *arguments: Any) -> Any:
        if op == ir.ATOMIC_OP.XCHG and arguments[-2] == ir.MEM_SEMANTIC.RELEASE:
            send()
        return atomic(op, *arguments)

    def create_masked_store(pointers: Any, *arguments: Any) -> Any:
        if any(int(pointers.data.flat[0]) in own for own in words):
            send()
        return store(pointers, *arguments)

    builder.create_atomic_rmw = create_atomic_rmw
    builder.create_masked_store = create_masked_store
    try:
        yield
    finally:
        del builder.create_atomic_rmw, builder.create_masked_store


@contextlib.contextmanager
def _cut_short(fabric: Fabric, programs: int, interrupt: Callable[[], Any]) -> Iterator[None]:
    """Within the context, do something before a launch, of which so many programs have then run.

    These are senders, whose ids are the lowest. Compiled kernels cannot be interrupted.
    """

    def launch(kernel: Kernel, args: tuple[Any, ...]) -> None:
        if programs:
            launch_normally(replace(kernel, grid=programs), args)
            fabric.synchronize()
        interrupt()
        launch_normally(kernel, args)

    with launching_through(launch):
        yield


def fail_differently(fabric: Fabric, raised: Mapping[int, tuple[str, float] | None]) -> None:
    """Raise what `raised` says for this rank, after so many seconds; None hangs."""
    mine = raised[fabric.rank]
    if mine is None:
        time.sleep(60)
        return
    what, seconds = mine
    time.sleep(seconds)
    if what == "driver":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if what == "error":
        raise RuntimeError("no")
    if what == "store":
        HashStore().wait(["of a peer"], timedelta(milliseconds=1))
    raise PeerTimeout(f"rank {fabric.rank}: {what}", is_secondary=what == "echo")
