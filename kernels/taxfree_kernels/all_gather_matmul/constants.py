"""Launch constants of the gather's kernels, from a problem and a config.

Part of what is measured, so included in the kernels' hash; what is searched is in
:mod:`taxfree_kernels.all_gather_matmul.spaces`.
"""

from __future__ import annotations

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.variant import Config


def sends_to_self(problem: AllGatherMatmul, config: Config) -> bool:
    """Whether tiles read own rows from the inbox: they mix ranks' rows, or rows come in parts."""
    return problem.tiles_mix_ranks(config["BLOCK_M"]) or config["K_PARTS"] > 1


def steps_of_part(problem: AllGatherMatmul, config: Config) -> int:
    """Steps of BLOCK_K in each of K_PARTS, but for the last."""
    return -(-problem.shard_columns // (config["K_PARTS"] * config["BLOCK_K"]))
