"""The chiplet (XCD) that runs a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chiplet_of_program(XCDS: tl.constexpr, BACKEND: tl.constexpr):
    """The number of the chiplet that runs this program, int32.

    On AMD it is read from the hardware. Elsewhere it follows from the rule that AMD documents:
    programs are assigned round-robin to XCDS chiplets.
    """
    if BACKEND == "hip":
        register = tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID)", "=s", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        chiplet = register & 15
    else:
        chiplet = tl.program_id(0) % XCDS
    return chiplet
