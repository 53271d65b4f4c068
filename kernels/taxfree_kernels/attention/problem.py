"""Dimensions of an attention, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import Cost, HeadsProblem

ITEM_BYTES = 2  # of either
MOST_PACKED = 4096  # sequences: each program reads where all of them begin


@dataclass(frozen=True)
class Attention(HeadsProblem):
    """Prompts attend to themselves; each rank to its own, without its peers.

    Args:
        batch: sequences.
        length: tokens of each sequence; of packed ones, of all together.
        q_heads: query heads of this rank.
        kv_heads: key and value heads; each serves q_heads / kv_heads query heads.
        head_dim: of queries, keys and values.
        causal: whether a token sees no later one.
        packed: whether sequences lie one behind the other, and their lengths are read on the
            device, so that they may change between replays of a graph.
        dtype: "float16" or "bfloat16", of inputs and output.
        world_size: ranks.
        kv_scales: see :class:`HeadsProblem`.

    Raises:
        PlanError: on impossible dimensions.
    """

    batch: int
    length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    packed: bool = False
    dtype: str = "float16"
    world_size: int = 1
    kv_scales: str = "none"

    def __post_init__(self) -> None:
        self._require("batch", "length")
        if self.packed and self.batch > MOST_PACKED:
            raise PlanError(f"batch is {self.batch}, at most {MOST_PACKED} sequences are packed")

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.length if self.packed else self.batch * self.length

    @property
    def is_aligned(self) -> bool:
        """Whether all heads of contiguous tensors start at multiples of 16 bytes."""
        return self.head_dim * self.kv_bytes % 16 == 0

    @property
    def cost(self) -> Cost:
        """Per rank and call; of packed sequences, as if they had the same length."""
        length = -(-self.tokens // self.batch)
        seen = self.tokens * ((length + 1) // 2 if self.causal else length)
        return Cost(
            flops=4 * seen * self.q_heads * self.head_dim,
            memory_bytes=2 * self.tokens * self.head_dim
            * (ITEM_BYTES * self.q_heads + self.kv_bytes * self.kv_heads),
            link_bytes=0,
        )  # fmt: skip

    @property
    def slot_bytes(self) -> int:
        """Nothing is exchanged, but a pool has no empty slots."""
        return 1


PROBLEM = Attention
