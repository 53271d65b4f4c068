"""The controller's side of the measured probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from taxfree.settings import Settings
from taxfree_kernels.fabric.heap import arena_bytes
from taxfree_tune.doctor.report import Guard, ProbeResults
from taxfree_tune.workers.group import WorkerGroup, Workers

#: field of ProbeResults, and task -> its name in messages; last those whose lost signals leave the
#: pool aborted
PROBES = {
    "rates": "rates of bounds",
    "order": "program start order",
    "barrier": "graph capture",
    "peers": "peer bandwidth",
    "coherence": "coherence of the heap",
    "signals": "signal round trip",
}

_NEED_PEERS = ("peers", "coherence", "signals")
_DEADLINE_S = 60.0  # of a probe: compilation, a wait that times out, and a second of running
_LONGEST_WAIT_S = 10.0  # of a rank for a peer
_STARTS = 2  # of the ranks: the second when a probe has lost them


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
    from taxfree_tune.doctor import tasks  # imports torch, without which there is a report as well

    settings = guard("settings", Settings.from_environment, Settings())
    timeout_s = min(settings.timeout_s, _LONGEST_WAIT_S)
    peer_bytes = tasks.HOST_PEER_BYTES if fabric == "host" else tasks.GPU_PEER_BYTES
    heap_bytes = arena_bytes(2 * peer_bytes)
    tell(f"opening fabric {fabric} on {world_size} ranks")
    measured = ProbeResults(fabric, world_size, interpreted=fabric == "host")
    with Workers(lambda: WorkerGroup(world_size, fabric, heap_bytes, timeout_s), _STARTS) as ranks:
        ranks.group()

        def run(field: str) -> Any:
            return ranks.group().call(getattr(tasks, field), deadline_s)[0]

        for field, what in PROBES.items():
            if world_size == 1 and field in _NEED_PEERS:
                continue
            tell(f"measuring {what}")
            measured = replace(measured, **{field: guard(what, partial(run, field), None)})
    if world_size == 1:
        guard.problems["peers"] = "what is between ranks needs two of them"
    return measured
