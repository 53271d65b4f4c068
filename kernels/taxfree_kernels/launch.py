"""Launching kernels, and who else may want to know of a launch.

Plans launch through :class:`Kernel`. By default that is Triton's own launcher; the compile screen
records the launch instead, and the happens-before checker runs its programs itself, so that what
is screened and checked is exactly what runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Kernel:
    """A jitted function with everything about its launch that a plan fixes.

    Args:
        function: the ``triton.jit`` function.
        grid: number of programs; grids are one-dimensional, because hardware and interpreter
            order the dimensions of others differently.
        constants: its constexpr arguments, by name.
        options: compile options (``num_warps``, ``num_stages``, and the target's own).
    """

    function: Any
    grid: int
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any) -> None:
        launcher = _launcher.get()
        if launcher is not None:
            launcher(self, args)
            return
        self.function[(self.grid,)](*args, **self.constants, **self.options)


def compile_options(backend: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What Triton is told beside the constants; fusing of multiply and add is always explicit."""
    if backend == "interpreter":
        return {}
    names = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "launch_pdl")
    return {name: config[name] for name in names if name in config} | {"enable_fp_fusion": True}


def copy_to_peer(target: torch.Tensor, source: torch.Tensor) -> None:
    """Let a copy engine store into a peer's memory, on the current stream.

    Where kernels are only compiled nothing is copied: the signals that make room for it do not run.
    """
    if _launcher.get() is not _compile:
        target.copy_(source)


class Launcher(Protocol):
    """Takes the place of Triton's launcher."""

    def __call__(self, kernel: Kernel, args: tuple[Any, ...]) -> None: ...


_launcher: ContextVar[Launcher | None] = ContextVar("taxfree_launcher", default=None)


@contextlib.contextmanager
def launching_through(launcher: Launcher) -> Iterator[None]:
    """Within the context, kernels go to `launcher` instead of the device."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Within the context, kernels are compiled and loaded on this device but not run.

    So that no rank waits inside a kernel for a peer that is still compiling. Interpreted kernels
    have nothing to compile.
    """
    with launching_through(_compile):
        yield


def _compile(kernel: Kernel, args: tuple[Any, ...]) -> None:
    compiled = kernel.function.warmup(
        *args, grid=(kernel.grid,), **kernel.constants, **kernel.options
    )
    if hasattr(compiled, "_init_handles"):  # loads the binary; raises where it cannot run
        compiled._init_handles()
