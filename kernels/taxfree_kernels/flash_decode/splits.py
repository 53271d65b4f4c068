"""The library path with tuned kernels: the baseline, with meta-parameters.

It is measured with the fused variants, so that gains of better splits do not count as gains of
fusion.
"""

from __future__ import annotations

from taxfree_kernels.flash_decode import spaces
from taxfree_kernels.flash_decode.baseline import BaselinePlan
from taxfree_kernels.flash_decode.plans import DecodeVariant
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Space


class Splits(DecodeVariant):
    """The baseline's pipeline with other splits; for one rank, its attention alone."""

    plan_class = BaselinePlan
    fused = False
    is_library = True

    def space(self, problem: FlashDecode, hardware: Hardware) -> Space:
        space = super().space(problem, hardware)
        if problem.world_size == 1:
            return {
                **space,
                **spaces.last_space(hardware),
                **spaces.chained_space(problem, hardware),
                **spaces.by_warp_space(problem, hardware),
            }
        return space


VARIANT = Splits()
