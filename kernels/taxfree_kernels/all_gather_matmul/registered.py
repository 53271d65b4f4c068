"""The library path on registered buffers: NCCL's low-latency kernels, then the vendor's matmul.

Both ends of the collective live in a memory pool that is registered with the communicator as
symmetric; the caller's shard is copied into it, which the time includes.
"""

from __future__ import annotations

from taxfree_kernels.all_gather_matmul.baseline import BaselinePlan
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.several import SeveralWeights
from taxfree_kernels.registered import RegisteredPlan, RegisteredVariant


class RegisteredGatherPlan(RegisteredPlan, BaselinePlan):
    """The baseline's pipeline between registered buffers."""

    def _copies_shard(self, problem: AllGatherMatmul) -> bool:
        return True


class Registered(RegisteredVariant, SeveralWeights):
    """All-gather between registered buffers, vendor matmul."""

    plan_class = RegisteredGatherPlan


VARIANT = Registered()
