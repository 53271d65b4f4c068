"""Dimensions of an all_gather_matmul, and its work and memory."""

from __future__ import annotations

from dataclasses import dataclass

from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import BLOCK, ITEM_BYTES, Cost, Sharded

_ALIGNMENT = 16  # bytes, of the scales behind the rows in an inbox


@dataclass(frozen=True)
class AllGatherMatmul(Sharded):
    """out[M, N] = all_gather(a_shard)[M, K] @ weight[K, N] (+ bias[N]), as each rank computes it.

    Args:
        m: rows of the gathered A, over all ranks.
        n: columns of this rank's weight.
        k: columns of the gathered A.
        gather_dim: 0: rank r holds rows [r * ceil(m / world_size), ...), the last ranks fewer or
            none; 1: rank r holds columns [r * k / world_size, ...).
        dtype: "float16" or "bfloat16", of all tensors but fp8 factors.
        world_size: ranks.
        weight_layout: which dimension of the weight is contiguous last: "nk" is K, as in the
            transposed weight of a ``torch.nn.Linear``; "kn" is N.
        bias: whether a bias is added.
        x_dtype, scales, fast_accumulation: see :class:`MatmulProblem`; x is A.

    Raises:
        PlanError: on impossible dimensions.
    """

    m: int
    n: int
    k: int
    gather_dim: int = 1
    dtype: str = "float16"
    world_size: int = 1
    weight_layout: str = "nk"
    bias: bool = False
    x_dtype: str = "same"
    scales: str = "none"
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gather_dim not in (0, 1):
            raise PlanError(f"gather_dim is {self.gather_dim}, must be 0 (rows) or 1 (columns)")
        if self.gather_dim == 1 and self.k % self.world_size:
            raise PlanError(
                f"k={self.k} is not divisible by {self.world_size} ranks",
                "with gather_dim=1 each rank holds k / world_size columns",
            )
        if self.scales == "block" and self.shard_columns < self.k and self.shard_columns % BLOCK:
            raise PlanError(
                f"shards of {self.shard_columns} columns begin within a block of {BLOCK}",
                f"k / world_size must be a multiple of {BLOCK}",
            )

    @property
    def shard_dim(self) -> int:
        return self.gather_dim

    @property
    def shard_columns(self) -> int:
        return self.k // self.world_size if self.gather_dim == 1 else self.k

    def tiles_mix_ranks(self, block_m: int) -> bool:
        """Whether tiles of `block_m` rows of the gathered A hold rows from several ranks."""
        return self.gather_dim == 0 and self.shard_rows % block_m > 0

    @property
    def gathered_elements(self) -> int:
        """Elements of an inbox: A, gathered in full shards."""
        return self.world_size * self.shard_rows * self.shard_columns

    @property
    def scale_columns(self) -> int:
        """Scales of a row of a shard that travel with it; 0 where all ranks have the same."""
        if self.scales == "block":
            return -(-self.shard_columns // BLOCK)
        return int(self.scales == "channel" and self.gather_dim == 0)

    @property
    def inbox_elements(self) -> int:
        """Elements of an inbox, and in fp8 the bytes of the scales behind them."""
        if not self.scale_columns:
            return self.gathered_elements
        scale_bytes = 4 * self.world_size * self.shard_rows * self.scale_columns
        return -(-self.gathered_elements // _ALIGNMENT) * _ALIGNMENT + scale_bytes

    @property
    def cost(self) -> Cost:
        own_rows = self.rows_of(self.world_size - 1)  # the smallest shard
        sources = self.world_size if self.gather_dim == 1 else 1  # that hold a part of a row
        row_bytes = self.factor_bytes * self.shard_columns + 4 * self.scale_columns
        return Cost(
            flops=2 * self.m * self.n * self.k,
            memory_bytes=self.factor_bytes * (self.m * self.k + self.k * self.n)
            + self.scale_bytes
            + ITEM_BYTES[self.dtype] * self.m * self.n,
            link_bytes=row_bytes * (sources * self.m - own_rows),
        )

    @property
    def slot_bytes(self) -> int:
        return self.factor_bytes * self.inbox_elements


PROBLEM = AllGatherMatmul
