"""Launch constants of kernels whose warps have roles, by a config's consumers."""

from __future__ import annotations

ROWS = 64  # queries of a consumer, which is a warpgroup
REGISTERS = {2: 240, 3: 160}  # of a thread of so many consumers, besides a producer's
