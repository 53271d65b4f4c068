"""The controller's side of the measured probes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from taxfree.doctor.guard import Guard
from taxfree.doctor.report import ProbeResults
from taxfree.errors import TaxfreeError
from taxfree.settings import Settings
from taxfree.workers.group import WorkerGroup
from taxfree_kernels.fabric.layout import arena_bytes

#: field of ProbeResults, and task -> what it is; last those whose lost signals leave the pool aborted
PROBES = {
    "rates": "rates of bounds",
    "memory": "memory bandwidth",
    "order": "program start order",
    "barrier": "graph capture",
    "peers": "peer bandwidth",
    "copies": "peer copies by torch",
    "coherence": "coherence of the heap",
    "signals": "signal round trip",
}

_NEED_PEERS = ("peers", "copies", "coherence", "signals")
_DEADLINE_S = 60.0  # of a probe: compilation, a wait that times out, and a second of running
_LONGEST_WAIT_S = 10.0  # of a rank for a peer
_GROUPS = 2  # that may be started: the second when a probe has lost the first

#: to or from a peer, in one go; a slot of the pool holds what is sent and what is received, or as
#: much for all peers
HOST_PEER_BYTES, GPU_PEER_BYTES = 256 << 10, 64 << 20


def measure(
    guard: Guard,
    fabric: str,
    world_size: int,
    tell: Callable[[str], None],
    deadline_s: float = _DEADLINE_S,
) -> ProbeResults:
    """Run all probes on a group of ranks.

    Args:
        guard: keeps why probes failed.
        tell: told what is being done.
        deadline_s: of each probe, in seconds; one that hangs is ended with its ranks.

    Raises:
        TaxfreeError: the fabric does not open; the message says why.
    """
    settings = guard("settings", Settings.from_environment, Settings())
    timeout_s = min(settings.timeout_s, _LONGEST_WAIT_S)
    heap_bytes = arena_bytes(2 * (HOST_PEER_BYTES if fabric == "host" else GPU_PEER_BYTES))
    tell(f"opening fabric {fabric} on {world_size} ranks")
    ranks = _Ranks(lambda: WorkerGroup(world_size, fabric, heap_bytes, timeout_s), deadline_s)
    measured = ProbeResults(fabric, world_size, interpreted=fabric == "host")
    with contextlib.closing(ranks):
        for field, what in PROBES.items():
            if world_size == 1 and field in _NEED_PEERS:
                continue
            tell(f"measuring {what}")
            measured = replace(measured, **{field: guard(what, partial(ranks.run, field), None)})
    if world_size == 1:
        guard.problems["peers"] = "what is between ranks needs two of them"
    return measured


class _Ranks:
    """A worker group that probes run on, started anew after one has lost it."""

    def __init__(self, start: Callable[[], WorkerGroup], deadline_s: float) -> None:
        self._start = start
        self._deadline_s = deadline_s
        self._group = start()
        self._started = 1

    def run(self, task: str) -> Any:
        """What a task of :mod:`taxfree.doctor.tasks` returns on rank 0.

        Raises:
            TaxfreeError: it failed, hung or was not tried.
        """
        if not self._group.is_alive:
            if self._started == _GROUPS:
                raise TaxfreeError("not tried, as the ranks were lost before")
            self._started += 1
            self._group = self._start()
        return self._group.call(f"taxfree.doctor.tasks:{task}", self._deadline_s)[0]

    def close(self) -> None:
        self._group.close()
