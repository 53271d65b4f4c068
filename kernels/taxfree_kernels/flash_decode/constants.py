"""Launch constants of the attention kernels, derived from a problem and a config.

They decide what is measured for a config; the search space is in
:mod:`taxfree_kernels.flash_decode.spaces`.
"""

from __future__ import annotations

from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.variant import Config


def chunk_rows(problem: FlashDecode, config: Config) -> int:
    """Rows of a chunk: at most CHUNKS chunks of whole tiles; with LL, one tile per chunk."""
    if config.get("LL"):
        return int(config["ROWS"])
    tiles = -(-problem.rows // config["ROWS"])
    return int(config["ROWS"] * -(-tiles // config["CHUNKS"]))


def words_of_part(problem: FlashDecode, packed: bool) -> int:
    """Words of one part, a multiple of 64: Lamport words for packed rows, else LL packets."""
    if not packed:
        return problem.part_elements
    return -(-problem.rows * (problem.v_head_dim // 2 + 4) // 64) * 64
