"""Dimensions of a flash_decode, and its work and memory."""

from __future__ import annotations

from dataclasses import dataclass

from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import Cost, HeadsProblem

ITEM_BYTES = 2  # of either


@dataclass(frozen=True)
class FlashDecode(HeadsProblem):
    """One query token per sequence attends to keys that are sharded over the ranks.

    Lengths are not part of a problem: kernels read them on the device, so that they may change
    between replays of a graph.

    Args:
        batch: sequences.
        q_heads: query heads, replicated on all ranks.
        kv_heads: key and value heads; each serves q_heads / kv_heads query heads.
        head_dim: of queries and keys.
        kv_len_per_rank: capacity of a rank, in keys of one sequence.
        v_head_dim: of values and of the output; 0 means head_dim.
        page_size: keys of a page of the cache; 0: the cache is dense.
        soft_cap: whether logits are capped by cap * tanh(logit / cap).
        window: the last keys, over all ranks, that a query sees; 0: all.
        kv_scales: see :class:`HeadsProblem`.
        dtype: "float16" or "bfloat16", of queries and output, and of a cache that is not in fp8.
        world_size: ranks.

    Raises:
        PlanError: on impossible dimensions.
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_len_per_rank: int
    v_head_dim: int = 0
    page_size: int = 0
    soft_cap: bool = False
    window: int = 0
    dtype: str = "float16"
    world_size: int = 1
    kv_scales: str = "none"

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:  # one problem has one notation, hash and record
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name in ("page_size", "window"):
            if getattr(self, name) < 0:
                raise PlanError(f"{name} is {getattr(self, name)}, must not be negative")
        self._require("batch", "kv_len_per_rank", head_dims=("head_dim", "v_head_dim"))

    @property
    def group_size(self) -> int:
        """Query heads that share a kv head."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query heads of all sequences: each is a row of the output."""
        return self.batch * self.q_heads

    @property
    def is_aligned(self) -> bool:
        """Whether all rows of a contiguous cache start at multiples of 16 bytes."""
        elements = 16 // self.kv_bytes
        return self.head_dim % elements == 0 and self.v_head_dim % elements == 0

    @property
    def pages_per_sequence(self) -> int:
        """Columns of the block table of a paged cache."""
        return -(-self.kv_len_per_rank // self.page_size)

    @property
    def part_elements(self) -> int:
        """float32 values of one part: its rows, then their log-sum-exps, padded to 256 bytes."""
        return -(-self.rows * (self.v_head_dim + 1) // 64) * 64

    @property
    def cost(self) -> Cost:
        """Per rank and call, when every rank is full.

        On links: a rank combines its share of the rows from all ranks' parts and sends it to all,
        both in 16 bits, with one float32 log-sum-exp for each row of a part.
        """
        keys = min(self.kv_len_per_rank, self.window or self.kv_len_per_rank)
        dims = self.head_dim + self.v_head_dim
        cache = self.batch * keys * self.kv_heads * dims
        sent = 4 * (self.world_size - 1) * self.rows * (self.v_head_dim + 1)
        table = 4 * self.batch * self.pages_per_sequence if self.page_size else 0
        return Cost(
            flops=2 * self.rows * keys * dims,
            memory_bytes=self.kv_bytes * cache + ITEM_BYTES * self.rows * dims + table,
            link_bytes=sent // self.world_size,
        )

    @property
    def slot_bytes(self) -> int:
        """Symmetric memory that a call of any variant needs in one payload slot.

        A part of every rank, and the combined rows of the output.
        """
        return 4 * (self.world_size + 1) * self.part_elements


PROBLEM = FlashDecode
