"""Dimensions of an attention, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import DTYPES, Cost, Problem

ITEM_BYTES = 2  # of either
LEAST_HEAD_DIM, MOST_HEAD_DIM = 16, 256
MOST_PACKED = 4096  # sequences: each program reads where all of them begin


@dataclass(frozen=True)
class Attention(Problem):
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

    def __post_init__(self) -> None:
        for name in ("batch", "length", "q_heads", "kv_heads", "world_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}, must be at least 1")
        if not LEAST_HEAD_DIM <= self.head_dim <= MOST_HEAD_DIM:
            raise PlanError(
                f"head_dim is {self.head_dim}, must be from {LEAST_HEAD_DIM} to {MOST_HEAD_DIM}"
            )
        if self.dtype not in DTYPES:
            raise PlanError(f"dtype {self.dtype} is not one of {', '.join(DTYPES)}")
        if self.q_heads % self.kv_heads:
            raise PlanError(
                f"q_heads={self.q_heads} is not divisible by kv_heads={self.kv_heads}",
                "each kv head serves the same number of query heads",
            )
        if self.packed and self.batch > MOST_PACKED:
            raise PlanError(f"batch is {self.batch}, at most {MOST_PACKED} sequences are packed")

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.length if self.packed else self.batch * self.length

    @property
    def is_aligned(self) -> bool:
        """Whether all heads of contiguous tensors start at multiples of 16 bytes."""
        return self.head_dim % 8 == 0

    @property
    def cost(self) -> Cost:
        """Per rank and call; of packed sequences, as if they had the same length."""
        length = -(-self.tokens // self.batch)
        seen = self.tokens * ((length + 1) // 2 if self.causal else length)
        return Cost(
            flops=4 * seen * self.q_heads * self.head_dim,
            memory_bytes=2 * ITEM_BYTES * self.tokens * (self.q_heads + self.kv_heads)
            * self.head_dim,
            link_bytes=0,
        )  # fmt: skip

    @property
    def slot_bytes(self) -> int:
        """Nothing is exchanged, but a pool has no empty slots."""
        return 1


PROBLEM = Attention
