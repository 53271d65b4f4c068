"""Launch constants of the attention kernels, derived from a problem and a config.

They are part of what was measured, so this file is included in the kernels' hash; the search space
is in :mod:`taxfree_kernels.flash_decode.spaces`.
"""

from __future__ import annotations

from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.variant import Config


def chunk_rows(problem: FlashDecode, config: Config) -> int:
    """Rows of a chunk: at most CHUNKS chunks of whole tiles; one tile if words need no signal."""
    if config.get("LL"):
        return int(config["ROWS"])
    tiles = -(-problem.rows // config["ROWS"])
    return int(config["ROWS"] * -(-tiles // config["CHUNKS"]))


def words_of_part(problem: FlashDecode, packed: bool) -> int:
    """Words of one part, a multiple of 64: bare ones of packed rows, else LL packets."""
    if not packed:
        return problem.part_elements
    return -(-problem.rows * (problem.v_head_dim // 2 + 4) // 64) * 64
