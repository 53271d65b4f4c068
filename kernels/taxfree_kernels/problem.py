"""Base classes of problems that combine a matmul with a collective."""

from __future__ import annotations

from abc import abstractmethod

from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import Problem

DTYPES = ("float16", "bfloat16")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class MatmulProblem(Problem):
    """A matmul [m, k] @ [k, n] before or after a collective.

    Raises:
        PlanError: on impossible dimensions.
    """

    m: int
    n: int
    k: int
    weight_layout: str

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "world_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.dtype not in DTYPES:
            raise PlanError(f"dtype {self.dtype} is not one of {', '.join(DTYPES)}")
        if self.weight_layout not in ("nk", "kn"):
            raise PlanError(f"weight_layout is {self.weight_layout!r}, must be 'nk' or 'kn'")


class PartialSum(MatmulProblem):
    """A matmul in which each rank computes a partial sum."""

    @property
    def elements(self) -> int:
        """Elements of the whole sum, and of each rank's partial sum."""
        return self.m * self.n

    @property
    @abstractmethod
    def kept_elements(self) -> int:
        """Elements of the rank's result."""

    @property
    @abstractmethod
    def wires(self) -> tuple[str, ...]:
        """The types in which partial sums may be sent."""


def own_rows(m: int, shard_dim: int, world_size: int, rank: int) -> int:
    """Rows of a rank's shard that are below M; see :class:`Sharded`."""
    if shard_dim == 1:
        return m
    full = -(-m // world_size)
    return max(0, min(m - rank * full, full))


class Sharded(MatmulProblem):
    """A matmul in which each rank holds a shard of A, or keeps a shard of the result.

    Shards of rows are equal, but those at the end of a ragged M have fewer rows or none.
    """

    @property
    @abstractmethod
    def shard_dim(self) -> int:
        """The dimension that the ranks split: 0 (rows) or 1 (columns)."""

    @property
    def shard_rows(self) -> int:
        """Rows of a full shard."""
        return self.m if self.shard_dim == 1 else -(-self.m // self.world_size)

    @property
    @abstractmethod
    def shard_columns(self) -> int:
        """Columns of a shard."""

    def rows_of(self, rank: int) -> int:
        """Rows of the shard of `rank` that are below M."""
        return own_rows(self.m, self.shard_dim, self.world_size, rank)
