"""Layouts that host and device share: a pool's control block, and the report of a timeout."""

from __future__ import annotations

import triton.language as tl

# -- layout of a pool's control block, in int64 words -----------------------------------------
GENERATION = tl.constexpr(0)  # of the last finished call, in units of ONE_CALL
LIMIT = tl.constexpr(2)  # bound of a wait, in ticks
ABORT = tl.constexpr(3)  # 1 + the rank that was lost; written by peers too; 0 while all is well
REPORTED = tl.constexpr(4)  # nonzero: one program of this rank has written the report
STATUS = tl.constexpr(5)  # address of the report, in host memory
LOG = tl.constexpr(6)  # address of the timeline; 0 for none
TURN = tl.constexpr(7)  # calls with Lamport words that have finished, in units of ONE_CALL
USED = tl.constexpr(8)  # [2]: Lamport words of a slot used by the last two such calls, by turn % 2
SIGNALS = tl.constexpr(16)  # signal words [channel, source]

#: The total that the programs of one call add to GENERATION; larger than any grid.
ONE_CALL = tl.constexpr(1 << 24)

# -- layout of a timeout report, in int64 words -----------------------------------------------
REPORT_WORDS = 8  # code, rank, program, channel, source, wanted, seen, lost
TIMED_OUT = tl.constexpr(1)
PEER_ABORTED = tl.constexpr(2)
NO_CHANNEL = tl.constexpr(-1)  # instead of a channel: the wait was for words
