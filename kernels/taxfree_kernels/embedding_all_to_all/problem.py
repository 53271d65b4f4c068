"""Dimensions of an embedding_all_to_all, and its work and memory."""

from __future__ import annotations

from dataclasses import dataclass

from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import ITEM_BYTES, Cost, Problem

POOLING = ("sum", "mean")


@dataclass(frozen=True)
class EmbeddingAllToAll(Problem):
    """Each rank's bags of indices become pooled rows of tables that are sharded over the ranks.

    Indices and lengths of bags are read on the device, so that they may change between replays of
    a graph; there is room for `bag` indices a bag on average.

    Args:
        batch: samples of each rank; a sample has a bag of indices for each table.
        bag: indices of a table for which there is room, over samples.
        tables: of all ranks.
        rows: of a table, as far as a rank holds it.
        dim: elements of a row; even.
        shard_dim: 0: each rank holds whole tables, rank r tables [r * tables // world_size, ...);
            1: each rank holds rows [r * rows, (r + 1) * rows) of each table.
        mode: how the rows of a bag are pooled: "sum" or "mean".
        weighted: whether each index has a weight, by which its row is multiplied; for "sum".
        dtype: "float16", "bfloat16" or "float32", of tables and output.
        world_size: ranks.

    Raises:
        PlanError: on impossible dimensions.
    """

    batch: int
    bag: int
    tables: int
    rows: int
    dim: int
    shard_dim: int = 0
    mode: str = "sum"
    weighted: bool = False
    dtype: str = "float16"
    world_size: int = 1

    def __post_init__(self) -> None:
        self._require("batch", "bag", "tables", "rows", "dim", dtypes=tuple(ITEM_BYTES))
        if self.dim % 2:
            raise PlanError(f"dim is {self.dim}, must be even", "pad the rows of the tables")
        if self.shard_dim not in (0, 1):
            raise PlanError(f"shard_dim is {self.shard_dim}, must be 0 (tables) or 1 (rows)")
        if self.mode not in POOLING:
            raise PlanError(f"mode is {self.mode!r}, must be one of {', '.join(POOLING)}")
        if self.weighted and self.mode != "sum":
            raise PlanError("a mean of weighted rows is not defined", "use mode='sum'")
        if self.world_size * self.tables * max(self.capacity, self.batch * self.row_words) >> 31:
            raise PlanError(f"{self}: kernels count indices and words of a call in 32 bits")
        if max(self.most_tables * self.rows, self.all_rows) >> 31:
            raise PlanError(
                f"{self}: rows of a rank are counted in 32 bits", "spread the tables on more ranks"
            )

    @property
    def capacity(self) -> int:
        """Indices of each table for which a rank has room."""
        return self.batch * self.bag

    @property
    def row_words(self) -> int:
        """Words of 32 bits of a row."""
        return self.dim * ITEM_BYTES[self.dtype] // 4

    @property
    def all_rows(self) -> int:
        """Rows of a table."""
        return self.rows * (self.world_size if self.shard_dim == 1 else 1)

    def tables_of(self, rank: int) -> range:
        """The tables of which a rank holds rows."""
        if self.shard_dim == 1:
            return range(self.tables)
        begin, end = (self.tables * each // self.world_size for each in (rank, rank + 1))
        return range(begin, end)

    @property
    def most_tables(self) -> int:
        """The most tables of which a rank holds rows."""
        return self.tables if self.shard_dim == 1 else -(-self.tables // self.world_size)

    @property
    def request_words(self) -> int:
        """Words that a rank sends to an owner: indices, their weights, and where bags begin.

        Padded to 16 bytes.
        """
        words = self.most_tables * (self.capacity * (1 + self.weighted) + self.batch + 1)
        return -(-words // 4) * 4

    @property
    def pooled_words(self) -> int:
        """Words of what a rank hears of pooled rows: of each owner where these have parts."""
        parts = self.world_size if self.shard_dim == 1 else 1
        return parts * self.batch * self.tables * self.row_words

    @property
    def cost(self) -> Cost:
        """Per rank and call, with full bags of indices that are spread evenly."""
        peers, world = self.world_size - 1, self.world_size
        pooled = 4 * self.batch * self.tables * self.row_words
        looked_up = self.tables * self.capacity  # by each rank, of all ranks' indices
        parts = peers if self.shard_dim == 1 else peers / world
        return Cost(
            flops=looked_up * self.dim,
            memory_bytes=4 * looked_up * (self.row_words + 1 + self.weighted) + pooled,
            link_bytes=4 * peers * self.request_words + int(parts * pooled),
        )

    @property
    def slot_bytes(self) -> int:
        """Symmetric memory that a call of any variant needs in one payload slot."""
        return 4 * (self.world_size * self.request_words + self.pooled_words)


PROBLEM = EmbeddingAllToAll
