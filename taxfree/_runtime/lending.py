"""Winners that another device lent: tried beside the library, with a record of the outcome.

The record is the borrower's own. The next start finds it, and tries nothing.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from taxfree import fingerprints
from taxfree._runtime.aside import aside
from taxfree._runtime.dispatch import Choice
from taxfree.errors import one_line
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Problem, Ready, op_of
from taxfree_tuning_db import OF_A_LENDER, Database, DatabaseError, Record

Keep = Callable[[Sequence[Record]], None]


def tried(
    fabric: Fabric, problem: Problem, lent: Record, plans: Sequence[tuple[Choice, Ready]]
) -> Record | str:
    """A record of lent choices beside the library, or why there is none; collective.

    Args:
        lent: the record that they are from.
        plans: of choices: the library's first, then the winner's.

    Returns:
        The same on all ranks, but for its dates.
    """
    from taxfree_tune.measuring.lent import (
        try_beside_library,  # measures only where something is lent
    )
    from taxfree_tune.measuring.results import Mode
    from taxfree_tune.measuring.trial import Candidate
    from taxfree_tune.tuning.winner import measurement_of, record_of

    begin, op = time.monotonic(), op_of(problem)
    expected_us = min(lent.baseline.median_us.values())
    trial = partial(try_beside_library, fabric, problem, [plan for _, plan in plans], expected_us)
    outcomes = aside(fabric.device, trial)
    if fabric.has_graphs:
        torch.cuda.empty_cache()  # an engine may be about to measure what is free
    if isinstance(outcomes, str):
        return outcomes
    candidates = [Candidate(planned.variant, planned.config) for planned, _ in plans]
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        if outcome.state != "measured" and fabric.rank == 0:
            warnings.warn(
                f"{candidate.variant}, which {lent.lender} lent for {problem}, is "
                f"{outcome.state} here: {outcome.reason}",
                RuntimeWarning,
                stacklevel=2,
            )
    mode: Mode = "graph" if fabric.has_graphs else "eager"
    return record_of(
        op,
        dataclasses.asdict(problem),
        fingerprints.hardware_fingerprint(fabric.hardware),
        fingerprints.software_fingerprint(),
        [
            measurement_of(op, candidate, outcome, mode)
            for candidate, outcome in zip(candidates, outcomes, strict=True)
            if outcome.state == "measured"
        ],
        len(plans) - 1,
        time.monotonic() - begin,
        datetime.now(UTC).isoformat(timespec="seconds"),
        incumbent=candidates[1],
        method=OF_A_LENDER,
        lender=lent.lender,
    )


def keep_in(path: Path) -> Keep:
    """What puts records into a user's database; if it cannot be written, one warning says so."""
    is_told = False

    def keep(records: Sequence[Record]) -> None:
        nonlocal is_told
        try:
            with Database(path) as database, database.transaction():
                for record in records:
                    database.put(record)
        except (DatabaseError, OSError) as error:
            if not is_told:
                warnings.warn(
                    f"winners that were lent are timed again at the next start: {one_line(error)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            is_told = True

    return keep
