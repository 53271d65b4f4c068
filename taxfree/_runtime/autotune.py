"""Tuning in an engine, between load and first request."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch.distributed as dist

from taxfree._runtime.autotuning import Autotuned
from taxfree._runtime.runtime import Runtime, runtimes
from taxfree.errors import UsageError
from taxfree.settings import duration, is_positive
from taxfree_kernels.errors import PeerTimeout


def autotune(budget: float | str = "60s") -> AbstractContextManager[list[Autotuned]]:
    """Tune, at the end of a block, the problems that its calls met without a record of their own.

    Around warm-up steps, on all ranks: ``with taxfree.autotune("60s"): model(batch)``. Problems
    of eager calls, of compiled code, of graphs that are captured and of :meth:`Runtime.prepare`
    count. At the end of the block the ranks of each open runtime tune them together, the most
    frequent first. Records go into rank 0's database, and calls that follow run by them; captured
    graphs keep what they captured.

    If the block raises, nothing is tuned. Problems that are left, with the reason, and what was
    tuned are logged by the logger ``taxfree``, one line each.

    Args:
        budget: for tuning, the block's own time not counted: seconds, or a text such as "90s" or
            "2m". What was begun is finished: it may take some seconds more.

    Returns:
        A context with a list, which holds the outcome of each problem after the end of the block.

    Raises:
        UsageError: the budget is no time; or, when it begins, a block is within another one.
        PeerTimeout: a rank is lost.
    """
    seconds = duration("budget", budget) if isinstance(budget, str) else budget
    if not is_positive(seconds):
        raise UsageError(f"budget is {budget}", 'give seconds, or a text such as "90s"')
    return _block(seconds)


@contextlib.contextmanager
def _block(seconds: float) -> Iterator[list[Autotuned]]:
    if Runtime._is_autotuned:
        raise UsageError("a block of autotune is within another one", "leave one of them out")
    outcomes: list[Autotuned] = []
    is_complete, Runtime._is_autotuned = False, True
    try:
        try:
            for runtime in runtimes():
                runtime._begin_block()
            yield outcomes
            is_complete = True
        finally:
            Runtime._is_autotuned = False
            met = {runtime: runtime._take_met() for runtime in runtimes()}
            for runtime in met:
                _blocks[runtime.group_name] += 1
                with contextlib.nullcontext() if is_complete else contextlib.suppress(RuntimeError):
                    _say(runtime, is_complete)
        deadline = time.monotonic() + seconds
        for number, (runtime, problems) in enumerate(met.items()):
            left = _left(runtime)
            if left:
                warnings.warn(
                    f"taxfree tunes nothing: ranks {left} left the block by an error",
                    RuntimeWarning,
                    stacklevel=3,  # of the block
                )
                continue
            share = (deadline - time.monotonic()) / (len(met) - number)
            outcomes += runtime._tune_now(problems, share)
    finally:
        for runtime in runtimes():
            runtime._end_block()


# Ranks agree through the store, where one that fails waits for nobody.

_blocks: Counter[str] = Counter()  # by group: how many have ended


def _say(runtime: Runtime, is_complete: bool) -> None:
    """Tell the other ranks how this one's block has ended."""
    _store().set(_key(runtime, runtime._fabric.rank), "complete" if is_complete else "left")


def _left(runtime: Runtime) -> list[int]:
    """The ranks whose blocks have raised; waits until all blocks have ended.

    Raises:
        PeerTimeout: some do not end.
    """
    try:
        said = [_store().get(_key(runtime, rank)) for rank in range(runtime.world_size)]
    except RuntimeError as error:
        raise PeerTimeout(
            f"rank {runtime._fabric.rank} waited in vain for the end of its peers' blocks",
            "all ranks use autotune around the same calls",
        ) from error
    return [rank for rank, word in enumerate(said) if word != b"complete"]


def _key(runtime: Runtime, rank: int) -> str:
    return f"taxfree autotune {runtime.group_name} {_blocks[runtime.group_name]} {rank}"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
