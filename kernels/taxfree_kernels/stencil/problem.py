"""Dimensions of a stencil on a domain that is cut over the ranks, and what its steps cost."""

from __future__ import annotations

from dataclasses import dataclass

from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import Cost, Problem

ITEM_BYTES = 4
#: Lamport words of a halo lie in three areas, which steps take in turns; see ``persistent``.
AREAS = 3


@dataclass(frozen=True)
class Stencil(Problem):
    """Jacobi steps: each point becomes the mean of its neighbours, those at the edges stay.

    Ranks hold equal parts of the domain. Rank r is in row r // across of a grid of ranks, and in
    column r % across.

    Args:
        rows, columns: points of the whole domain, at least 3; the ranks cut them.
        depth: points of the third dimension; 1: a plane, of which points have 4 neighbours, not 6.
        steps: of a call.
        norm_every: steps from one residual norm to the next; 0 for none.
        across: ranks that share the columns; the others share the rows.
        dtype: "float32".
        world_size: ranks.

    Raises:
        PlanError: on impossible dimensions.
    """

    rows: int
    columns: int
    depth: int = 1
    steps: int = 100
    norm_every: int = 0
    across: int = 1
    dtype: str = "float32"
    world_size: int = 1

    def __post_init__(self) -> None:
        self._require("rows", "columns", "depth", "steps", "across", dtypes=("float32",))
        if self.norm_every < 0:
            raise PlanError(f"norm_every is {self.norm_every}, must be at least 0")
        if self.world_size % self.across:
            raise PlanError(f"{self.world_size} ranks are no multiple of across={self.across}")
        for name, ranks in (("rows", self.down), ("columns", self.across)):
            size = getattr(self, name)
            if size % ranks:
                raise PlanError(
                    f"{name} is {size}, no multiple of the {ranks} ranks that share them",
                    "cut the domain into equal parts",
                )
            if size < 3:
                raise PlanError(f"{name} is {size}: a domain without inner points")
        if self.depth == 2:
            raise PlanError("depth is 2: a domain without inner points")

    @property
    def down(self) -> int:
        """Ranks that share the rows."""
        return self.world_size // self.across

    @property
    def own_rows(self) -> int:
        """Rows of a rank's part."""
        return -(-self.rows // self.down)

    @property
    def own_columns(self) -> int:
        """Columns of a rank's part."""
        return self.columns // self.across

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a rank's part: [rows, columns], or [rows, columns, depth]."""
        return (self.own_rows, self.own_columns, self.depth)[: 2 + (self.depth > 1)]

    @property
    def elements(self) -> int:
        """Points of a rank's part."""
        return self.own_rows * self.own_columns * self.depth

    @property
    def norms(self) -> int:
        """Residual norms of a call."""
        return self.steps // self.norm_every if self.norm_every else 0

    @property
    def halo(self) -> tuple[int, int]:
        """Points of the row, and of the column, that a neighbour sends in a step."""
        return (
            self.own_columns * self.depth * (self.down > 1),
            self.own_rows * self.depth * (self.across > 1),
        )

    @property
    def cost(self) -> Cost:
        """Of a rank with neighbours on all sides; memory may keep nothing between steps."""
        sides = sum(
            points * min(2, ranks - 1)
            for points, ranks in zip(self.halo, (self.down, self.across), strict=True)
        )
        neighbours = 4 if self.depth == 1 else 6
        return Cost(
            flops=self.steps * self.elements * neighbours,
            memory_bytes=2 * ITEM_BYTES * self.elements,
            link_bytes=self.steps * ITEM_BYTES * sides,
        )

    @property
    def slot_bytes(self) -> int:
        """Two halos, which steps take in turns, and all ranks' sums of the norms in float64."""
        return max(1, 4 * ITEM_BYTES * sum(self.halo) + 8 * self.norms * self.world_size)


PROBLEM = Stencil
