"""Device functions for a kernel that is launched before the kernel before it has ended.

On NVIDIA (programmatic dependent launch): the launch, and what a kernel does before it needs the
other's results, are hidden behind the other's last programs. Elsewhere, and where the launch was
an ordinary one, both functions do nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def let_the_next_begin(BACKEND: tl.constexpr):
    """Once all programs of this kernel have got here, those of the next take what is idle."""
    if BACKEND == "cuda":
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents;\n\tmov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait_for_the_last(BACKEND: tl.constexpr):
    """Wait until the kernel before has ended and its stores are visible.

    Above it nothing is loaded that that kernel stores.
    """
    if BACKEND == "cuda" and _is_launched_early():
        tl.inline_asm_elementwise(
            "griddepcontrol.wait;\n\tmov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def _is_launched_early(_semantic: Any = None) -> Any:
    """Whether the kernel that is being compiled has `launch_pdl`; an interpreted one may have."""
    return tl.constexpr(_semantic is None or _semantic.builder.options.launch_pdl)


_is_launched_early.__triton_builtin__ = True  # type: ignore[attr-defined]
