"""A launcher's program, such as an example of Iris, as calls of a world's ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.overrides import TorchFunctionMode

from taxfree_check.checker.world import World


def run_program(world: World, main: Callable[[], object], arguments: Sequence[str]) -> None:
    """Run a program on all ranks under each schedule, as `torchrun` starts it on GPUs.

    Its process group, its device and the processes that it spawns are the world's ranks; what it
    prints is not shown.

    Args:
        main: its main function.
        arguments: of its command line.

    Raises:
        CheckFailed: as of `World.run`.
    """

    def program(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world.ranks)}
        main()

    with _simulated(world, arguments):
        world.run(program, calls=1)


@contextlib.contextmanager
def _simulated(world: World, arguments: Sequence[str]) -> Iterator[None]:
    def nothing(*_: Any, **__: Any) -> None:
        pass

    def spawn(fn: Callable[..., object], args: Sequence[Any] = (), *_: Any, **__: Any) -> None:
        fn(world.rank, *args)  # each rank's host has come here

    of_group = {
        "init_process_group": nothing,
        "destroy_process_group": nothing,
        "is_initialized": lambda: True,
        "get_rank": lambda *_: world.rank,
        "get_world_size": lambda *_: world.ranks,
        "barrier": lambda *_, **__: world.barrier(),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch.object(sys, "argv", [sys.argv[0], *arguments]))
        for name, function in of_group.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        stack.enter_context(mock.patch.object(torch.multiprocessing, "spawn", spawn))
        for name in ("set_device", "synchronize"):
            stack.enter_context(mock.patch.object(torch.cuda, name, nothing))
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(_OnCpu())
        yield


class _OnCpu(TorchFunctionMode):
    """Tensors of GPUs are on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    is_device = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if is_device else value
