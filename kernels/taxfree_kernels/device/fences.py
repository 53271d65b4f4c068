"""Fences of one backend, which Triton does not emit itself."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def drain_stores(GROUP: tl.constexpr):
    """Wait for this wave's stores; used before a barrier and a release."""
    # On CDNA only the wave that issues the release waits for its own stores at the fence; every
    # wave has to wait for its own before the barrier.
    if GROUP.BACKEND == "hip":
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0",
            "=v",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def before_tma_loads(GROUP: tl.constexpr):
    """Fence between a wait and TMA loads of the data that was waited for.

    The stores and the acquire belong to the generic proxy, TMA to the async proxy.
    """
    if GROUP.BACKEND == "cuda":
        tl.inline_asm_elementwise(
            "fence.proxy.async.global;\n\tmov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
