"""The library path with tuned kernels: the baseline, with meta-parameters.

It is measured with the fused variants, so that gains of better splits do not count as gains of
fusion.
"""

from __future__ import annotations

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode.baseline import BaselinePlan
from taxfree_kernels.flash_decode.plans import DecodeVariant
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.variant import Config, Plan


class Library(DecodeVariant):
    """The baseline's pipeline with other splits; for one rank, its attention alone."""

    name = "library"
    fused = False

    def plan(self, problem: FlashDecode, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric, config)


VARIANT = Library()
