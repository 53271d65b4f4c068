"""Launch constants of the gather's kernels, from a problem and a config.

They decide what is measured for a config; the search space is in
:mod:`taxfree_kernels.all_gather_matmul.spaces`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.variant import Config


class Gather(NamedTuple):
    """The constants of a kernel that gathers A: its ``GATHER: tl.constexpr``.

    Args:
        GATHER_DIM: 0 for shards of rows, 1 for shards of columns.
        CHUNKS: number of chunks of rows per shard; each has a channel.
        SEND_BLOCK: elements that a sender copies at a time.
        SOURCES_PER_WAIT: peers that a tile waits for at once, with gather_dim 1.
        HAS_BIAS: a bias is added to the product.
        SENDERS: number of programs before the tiles'.
        TO_SELF: a rank also sends its own rows to itself.
        K_PARTS, PART_COLUMNS: number of parts of a row, and the columns of each but the last.
        SEND_STAGES: blocks that a sender has in flight.
        XCD_SIGNALS: chiplets whose senders signal together; 0 if each sender signals.
    """

    GATHER_DIM: int
    CHUNKS: int
    SEND_BLOCK: int = 0
    SOURCES_PER_WAIT: int = 1
    HAS_BIAS: bool = False
    SENDERS: int = 0
    TO_SELF: bool = False
    K_PARTS: int = 1
    PART_COLUMNS: int = 0
    SEND_STAGES: int = 1
    XCD_SIGNALS: int = 0

    @classmethod
    def of(cls, problem: AllGatherMatmul, config: Config, **derived: Any) -> Gather:
        """The constants from a config, and others that are derived from it."""
        meta_parameters = {name: config[name] for name in cls._fields if name in config}
        fixed = {"GATHER_DIM": problem.gather_dim, "HAS_BIAS": problem.bias}
        return cls(**{**fixed, **meta_parameters, **derived})


def sends_to_self(problem: AllGatherMatmul, config: Config) -> bool:
    """Whether tiles read own rows from the inbox: tiles mix ranks' rows, or rows are in parts."""
    return problem.tiles_mix_ranks(config["BLOCK_M"]) or config["K_PARTS"] > 1


def steps_of_part(problem: AllGatherMatmul, config: Config) -> int:
    """Steps of BLOCK_K in each of the K_PARTS parts except the last."""
    return -(-problem.shard_columns // (config["K_PARTS"] * config["BLOCK_K"]))
