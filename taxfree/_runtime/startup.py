"""Starting a runtime: the fabric is opened, and all ranks agree on one table and its settings."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import taxfree._runtime.ops  # registers the torch ops  # noqa: F401
from taxfree import fingerprints
from taxfree._runtime.collectives import vote
from taxfree._runtime.dispatch import Dispatcher
from taxfree._runtime.lending import keep_in
from taxfree._runtime.nodes import Place, names_of, nodes_fabric, place_here
from taxfree._runtime.runtime import Runtime
from taxfree._runtime.unrecorded import UnrecordedProblems
from taxfree._version import __version__
from taxfree.errors import TaxfreeError, UsageError
from taxfree.problems import recorded_problem
from taxfree.settings import Settings, is_positive
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import arena_bytes
from taxfree_kernels.fabric.open import hardware_here, open_fabric
from taxfree_kernels.variant import operation_names
from taxfree_tuning_db import (
    Database,
    DatabaseError,
    DatabaseMissing,
    Record,
    Table,
    default_path,
    shipped_records,
)

_GPU_SLOT_BYTES = 64 << 20
_HOST_SLOT_BYTES = 2 << 20


def init(
    group: dist.ProcessGroup | None = None,
    heap_bytes: int | None = None,
    timeout_s: float | None = None,
    plan_on_first_call: bool = True,
    db: str | Path | None = None,
    static_weights: bool = False,
    static_cache: bool = False,
) -> Runtime:
    """Open a fabric on a group and load the tuning table; collective.

    Args:
        group: the ranks; None for the default group, which must be initialised. If they are on
            several nodes, each must have as many, in order.
        heap_bytes: symmetric memory of each rank; by default sized for the largest problem that
            the table has for this group, with slots of at least 64 MiB (2 MiB on the host fabric).
        timeout_s: longest wait for a peer, in seconds; by default ``TAXFREE_TIMEOUT`` or 30.
        plan_on_first_call: plan an unprepared problem at its first eager call; otherwise it runs
            the baseline.
        db: the tuning database; by default ``TAXFREE_DB`` or the user's. Where there is none, only
            the records that ship with taxfree are used.
        static_weights: a promise of this rank: when a call is queued, or a graph with it is
            replayed, no work that has not finished yet writes the call's weight. Kernels may then
            load weights while the preceding kernel still runs. If the promise is broken, a call may
            multiply by old and new values, and nothing reports it.
        static_cache: a promise of this rank: when flash_decode is called, or a graph with it is
            replayed, no work that has not finished yet writes its lengths, its block table, or its
            cache, but for each sequence's newest key and value. Kernels may then load keys while
            the preceding kernel still runs. If the promise is broken, a call may attend to old
            keys, and nothing reports it.

    Raises:
        UsageError: there is no process group, its nodes have different numbers of ranks, or an
            argument or environment variable is invalid.
        DatabaseError: rank 0 cannot read the table.
        TaxfreeError: one of the above happened on another rank, which the message names.
        FabricUnavailable: no fabric serves here; the message says why.
        HeapExhausted: `heap_bytes` does not even hold the control words.
    """
    if not dist.is_initialized():
        raise UsageError(
            "no process group", "call torch.distributed.init_process_group() before taxfree.init()"
        )
    path = Path(os.path.expanduser(default_path() if db is None else db))
    settings, records, places = _agreed(group, heap_bytes, timeout_s, path)
    names = names_of(places)
    if records is None:
        settings, records = dataclasses.replace(settings, disable=True), []
    table = Table(user=records, shipped=shipped_records())
    if heap_bytes is None:
        used = () if settings.disable else table.records()
        heap_bytes = _heap_bytes(used, len(places) // len(names))
    bound_s = timeout_s or settings.timeout_s

    def opened(ranks: dist.ProcessGroup | None) -> Fabric:
        fabric = open_fabric("auto", ranks, heap_bytes, bound_s)
        fabric.static_weights = static_weights
        fabric.static_cache = static_cache
        return fabric

    def runtime(
        fabric: Fabric, unrecorded: UnrecordedProblems | None, autotune_s: float
    ) -> Runtime:
        dispatcher = Dispatcher(table, fabric.hardware, settings)
        keep = None if fabric.rank else keep_in(path)
        return Runtime(
            fabric, dispatcher, plan_on_first_call, heap_bytes, unrecorded, keep, path, autotune_s
        )

    if len(names) == 1:
        fabric = opened(group)
    else:
        fabric = nodes_fabric(
            group, names, bound_s, lambda ranks: runtime(opened(ranks), None, 0.0)
        )
    unrecorded = None if settings.log is None or fabric.rank else UnrecordedProblems(settings.log)
    return runtime(fabric, unrecorded, 0.0 if settings.disable else settings.autotune_s or 0.0)


def _agreed(
    group: dist.ProcessGroup | None, heap_bytes: int | None, timeout_s: float | None, db: Path
) -> tuple[Settings, list[Record] | None, Sequence[Place]]:
    """The settings, rank 0's table if all ranks have the same settings and versions, and places.

    An error on one rank is raised on all of them.
    """
    rank = dist.get_rank(group)
    settings, table, problem = Settings(), None, None
    try:
        _require_positive(heap_bytes=heap_bytes, timeout_s=timeout_s)
        settings = Settings.from_environment()
        table = _read_table(db) if rank == 0 else None
    except (UsageError, DatabaseError) as error:
        problem = error
    told = None if problem is None else (problem.message, problem.hint)
    versions = {op: fingerprints.versions(op) for op in operation_names()}
    steering = (settings.steering(), __version__, versions)
    answers = vote(group, (told, table, steering, place_here()))
    if problem is not None:
        raise problem
    for other, (told, *_) in enumerate(answers):
        if told is not None:
            raise TaxfreeError(f"rank {other}: {told[0]}", told[1])
    table, everyone = answers[0][1], [steering for _, _, steering, _ in answers]
    places = [place for *_, place in answers]
    differing = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if differing:
        if rank == 0:
            warnings.warn(
                f"taxfree runs the library only: ranks {differing} differ from rank 0 in their "
                "environment (TAXFREE_*) or in the versions of taxfree and its kernels",
                RuntimeWarning,
                stacklevel=3,
            )
        return settings, None, places
    return settings, [Record.from_json(document) for document in table], places


def _require_positive(**arguments: float | None) -> None:
    for name, value in arguments.items():
        if value is not None and not is_positive(value):
            raise UsageError(f"{name} is {value}", f"leave {name} out, or give a positive number")


def _read_table(path: Path) -> list[dict[str, Any]]:
    try:
        with Database(path, read_only=True) as database:
            return [record.to_json() for record in database.records()]
    except DatabaseMissing:
        return []  # nothing tuned yet: what is shipped, else the baseline


def _heap_bytes(records: Iterable[Record], world_size: int) -> int:
    hardware = hardware_here()
    slot = _HOST_SLOT_BYTES if hardware.backend == "interpreter" else _GPU_SLOT_BYTES
    own_hardware = fingerprints.hardware_fingerprint(hardware)
    for record in records:  # those that are lent, too
        if (
            not record.hardware.computes_like(own_hardware)
            or record.problem["world_size"] != world_size
        ):
            continue
        problem = recorded_problem(record.op, record.problem)
        if problem is not None:
            slot = max(slot, problem.slot_bytes)
    return arena_bytes(slot)
