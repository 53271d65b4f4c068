"""Dimensions of a matmul_all_reduce, and its work and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from taxfree_kernels.errors import PlanError
from taxfree_kernels.reduction.spaces import padded_elements, tiles_of
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import (
    ITEM_BYTES,
    SCALES,
    WIRE_BYTES,
    Cost,
    PartialSum,
    groups_of,
)

#: Largest output, in elements, for which every rank sends its whole partial sum to every peer and
#: keeps an inbox for each. Larger ones take too much time on the links, and too much memory.
ONE_SHOT_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class MatmulAllReduce(PartialSum):
    """out[M, N] = sum over ranks of x[M, K] @ weight[K, N] (+ bias[N]) (+ residual[M, N]).

    Bias and residual are the same on all ranks and are added once, to the sum. With `rms_norm`,
    out[2, M, N] holds that sum normalised, sum * rsqrt(mean of its row's squares + eps) *
    norm_weight[N], followed by the sum itself. Eps is read on the device. With `out_scales` the
    normalised sum is rounded to `dtype`, then to fp8, and an output holds it, its scales and the
    sum: see :mod:`taxfree_kernels.reduction.fused`.

    Args:
        m: rows of x and of the output.
        n: columns of the weight and of the output.
        k: columns of this rank's x: the ranks' share of the summed dimension.
        dtype: "float16" or "bfloat16", of all tensors but fp8 factors.
        world_size: ranks.
        weight_layout: which dimension of the weight is contiguous last: "nk" is K, as in the
            transposed weight of a ``torch.nn.Linear``; "kn" is N.
        bias, residual: whether they are added.
        rms_norm: whether the sum is also normalised.
        x_dtype, scales, fast_accumulation: see :class:`MatmulProblem`.
        out_scales: see :class:`PartialSum`; with `rms_norm` alone.
        fp8_wire: see :class:`PartialSum`; permits it, for two shots of many rows.

    Raises:
        PlanError: on impossible dimensions.
    """

    WIDE_ELEMENTS: ClassVar[int] = ONE_SHOT_ELEMENTS

    m: int
    n: int
    k: int
    dtype: str = "float16"
    world_size: int = 1
    weight_layout: str = "nk"
    bias: bool = False
    residual: bool = False
    rms_norm: bool = False
    x_dtype: str = "same"
    scales: str = "none"
    fast_accumulation: bool = False
    out_scales: str = "none"
    fp8_wire: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = ("none", *SCALES) if self.rms_norm else ("none",)
        if self.out_scales not in allowed:
            raise PlanError(
                f"out_scales is {self.out_scales!r}, one of {', '.join(allowed)}",
                "what is quantised is a normalised sum: rms_norm=1",
            )

    @property
    def is_quantised(self) -> bool:
        """Whether the normalised sum is in fp8."""
        return self.out_scales != "none"

    @property
    def norm_inputs(self) -> int:
        """Inputs that norms have: the weight, eps, and a scale if it is given."""
        return 3 if self.out_scales == "tensor" else 2

    @property
    def kept_elements(self) -> int:
        return self.elements

    @property
    def cost(self) -> Cost:
        """Per rank and call: every rank receives a share of the partial sums and of the result."""
        item, elements = ITEM_BYTES[self.dtype], self.elements
        received = elements - elements // self.world_size
        wire = WIRE_BYTES["fp8"] if self.fp8_wire else item
        factors, sums = self.m * self.k + self.k * self.n, (1 + self.residual) * elements
        normalised = self.rms_norm * (item * self.n + self._normalised_bytes)
        return Cost(
            flops=2 * self.m * self.n * self.k,
            memory_bytes=self.factor_bytes * factors + self.scale_bytes + item * sums + normalised,
            link_bytes=(wire + item) * received,
        )

    @property
    def _normalised_bytes(self) -> int:
        if not self.is_quantised:
            return ITEM_BYTES[self.dtype] * self.elements
        return self.elements + 4 * self.m * groups_of(self.n, self.out_scales)

    @property
    def slot_bytes(self) -> int:
        """Symmetric memory that a call of any variant needs in one payload slot.

        Two shots need room for a partial sum and a result, in whole tiles at most, of which each
        rank owns equally many. One shot needs every rank's partial sum, in padded rows.
        """
        rows, columns = min(128, power_of_2(self.m, 16)), min(256, power_of_2(self.n, 128))
        tiles, wire = tiles_of(self.m, self.n, rows, columns), ITEM_BYTES[self.wires[-1]]
        owned_by_all = -(-tiles // self.world_size) * self.world_size
        in_two = rows * columns * (wire * owned_by_all + ITEM_BYTES[self.dtype] * tiles)
        if self.elements > ONE_SHOT_ELEMENTS:
            return in_two
        return max(in_two, wire * self.world_size * padded_elements(self.m, self.n))


PROBLEM = MatmulAllReduce
