"""Device functions for a kernel that is launched before the preceding kernel has ended.

On NVIDIA (programmatic dependent launch): the launch, and whatever a kernel does before it needs
the preceding kernel's results, overlap with that kernel's last programs. On other devices, and
after an ordinary launch, both functions do nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def gdc_launch_dependents(GROUP: tl.constexpr):
    """Allow the next kernel to start once all programs of this one have called this."""
    if GROUP.BACKEND == "cuda":
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents;\n\tmov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def gdc_wait(GROUP: tl.constexpr):
    """Wait until the preceding kernel has ended and its stores are visible.

    Nothing that the preceding kernel stores may be loaded before this call.
    """
    if GROUP.BACKEND == "cuda" and _is_launched_early():
        tl.inline_asm_elementwise(
            "griddepcontrol.wait;\n\tmov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def _is_launched_early(_semantic: Any = None) -> Any:
    """Whether the kernel being compiled has `launch_pdl`; always true when interpreted."""
    return tl.constexpr(_semantic is None or _semantic.builder.options.launch_pdl)


_is_launched_early.__triton_builtin__ = True  # type: ignore[attr-defined]
