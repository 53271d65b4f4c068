"""The library path with its kernels tuned: what the baseline would be if it had meta-parameters.

Measured along with the fused variants, so that gains from better splits are not credited to fusion.
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
