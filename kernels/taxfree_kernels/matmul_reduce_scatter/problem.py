"""Dimensions of a matmul_reduce_scatter, and its work and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from taxfree_kernels.errors import PlanError
from taxfree_kernels.reduction.spaces import padded_elements
from taxfree_kernels.variant import ITEM_BYTES, WIRE_BYTES, Cost, PartialSum, Sharded


@dataclass(frozen=True)
class MatmulReduceScatter(PartialSum, Sharded):
    """A shard, on each rank, of the sum over ranks of x[M, K] @ weight[K, N].

    All shards have the same size; where M is ragged, rows beyond it are zero.

    Args:
        m: rows of x and of the sum.
        n: columns of the weight and of the sum.
        k: columns of this rank's x: the ranks' share of the summed dimension.
        scatter_dim: 0: rank r keeps rows [r * ceil(m / world_size), ...); 1: rank r keeps columns
            [r * n / world_size, ...).
        dtype: "float16" or "bfloat16", of all tensors but fp8 factors.
        world_size: ranks.
        weight_layout: which dimension of the weight is contiguous last: "nk" is K, as in the
            transposed weight of a ``torch.nn.Linear``; "kn" is N.
        x_dtype, scales, fast_accumulation: see :class:`MatmulProblem`.
        fp8_wire: see :class:`PartialSum`; permits it, for ``push``.

    Raises:
        PlanError: on impossible dimensions.
    """

    WIDE_ELEMENTS: ClassVar[int] = 1 << 24

    m: int
    n: int
    k: int
    scatter_dim: int = 0
    dtype: str = "float16"
    world_size: int = 1
    weight_layout: str = "nk"
    x_dtype: str = "same"
    scales: str = "none"
    fast_accumulation: bool = False
    fp8_wire: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scatter_dim not in (0, 1):
            raise PlanError(f"scatter_dim is {self.scatter_dim}, must be 0 (rows) or 1 (columns)")
        if self.scatter_dim == 1 and self.n % self.world_size:
            raise PlanError(
                f"n={self.n} is not divisible by {self.world_size} ranks",
                "with scatter_dim=1 each rank keeps n / world_size columns",
            )

    @property
    def shard_dim(self) -> int:
        return self.scatter_dim

    @property
    def shard_columns(self) -> int:
        return self.n // self.world_size if self.scatter_dim == 1 else self.n

    @property
    def kept_elements(self) -> int:
        return self.shard_rows * self.shard_columns

    @property
    def cost(self) -> Cost:
        item, shard = ITEM_BYTES[self.dtype], self.kept_elements
        factors = self.m * self.k + self.k * self.n
        return Cost(
            flops=2 * self.m * self.n * self.k,
            memory_bytes=self.factor_bytes * factors + self.scale_bytes + item * shard,
            link_bytes=WIRE_BYTES["fp8" if self.fp8_wire else self.dtype]
            * (self.world_size - 1)
            * shard,
        )

    @property
    def inbox_elements(self) -> int:
        """Elements of an inbox: a shard with padded rows from every rank."""
        return self.world_size * padded_elements(self.shard_rows, self.shard_columns)

    @property
    def slot_bytes(self) -> int:
        return ITEM_BYTES[self.wires[-1]] * self.inbox_elements


PROBLEM = MatmulReduceScatter
