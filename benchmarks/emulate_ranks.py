"""The tasks of the two ranks of an emulation; see :mod:`benchmarks.emulate`.

Ranks 0 and 1 exist, and each acts for all absent ranks towards the other. The absent ranks' arenas
are on the other GPU, so that stores to them cross the link and land in separate memory. Ranks act
symmetrically at the same time: a signal to the rank `distance` behind arrives as if the rank as far
before the receiver had sent it. LL packets keep their sender, and only those of existing ranks are
awaited.

A single rank has all arenas, and its peers are one of two:

 - *absent*: no kernel waits;
 - *alike*: they do what this rank does at the same time, and links take no time. Its signal to the
   rank `distance` behind arrives at itself, as if the rank as far before it had sent it. Of LL
   packets and Lamport words it awaits those that it sends to itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from benchmarks import local_decode
from benchmarks.promises import promises
from taxfree.errors import TaxfreeError
from taxfree.measuring import timer
from taxfree.measuring.bounds import vendor_kernel
from taxfree.measuring.trial import Calls, Candidate
from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import Peers
from taxfree_kernels.fabric.barrier import DeviceBarrier
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import Pool, SymmetricHeap
from taxfree_kernels.variant import Ready

VENDOR = "vendor"  # in the place of a variant
TIMEOUT_S = 5.0  # a wait of a kernel that cannot be emulated
_ALONE_TIMEOUT_S = 0.5  # of programs for others of the same kernel

#: the peers of a rank that is alone
PeersAre = Literal["absent", "alike"]

_signal, _receive, _load_words = sync.signal, packets.receive, packets._load_words


@triton.jit
def _signal_as_another(peers, channel, peer, GROUP: tl.constexpr, mask=None):
    receiver = tl.where(peer == peers.rank, peers.rank, 1 - peers.rank)
    _signal_as_if_before(peers, channel, peer, receiver, GROUP, mask)


@triton.jit
def _signal_itself(peers, channel, peer, GROUP: tl.constexpr, mask=None):
    _signal_as_if_before(peers, channel, peer, peer * 0 + peers.rank, GROUP, mask)


@triton.jit
def _signal_as_if_before(peers, channel, peer, receiver, GROUP: tl.constexpr, mask):
    """Signal `receiver` as the rank as far before it as this rank is before `peer`."""
    source = (receiver - peer + peers.rank + GROUP.WORLD) % GROUP.WORLD
    control_ptr = peers.control_ptr + (source - peers.rank)
    others = Peers(control_ptr, peers.heap_bases, peers.rank, peers.generation)
    _signal(others, channel, receiver, GROUP, mask=mask)


@triton.jit
def _receive_from_two(peers, words, source, GROUP: tl.constexpr, mask=None):
    return _receive_from(peers, words, source, source < 2, GROUP, mask)


@triton.jit
def _receive_from_itself(peers, words, source, GROUP: tl.constexpr, mask=None):
    return _receive_from(peers, words, source, source == peers.rank, GROUP, mask)


@triton.jit
def _receive_from(peers, words, source, exists, GROUP: tl.constexpr, mask):
    needed = tl.broadcast_to(exists, words.shape)
    if mask is not None:
        needed = needed & mask
    payload, arrived = _receive(peers, words, source, GROUP, mask=needed)
    return payload, arrived


@triton.jit
def _wait_for_nobody(peers, channel, source, GROUP: tl.constexpr, mask=None):
    return peers.generation > 0


@triton.jit
def _receive_at_once(peers, words, source, GROUP: tl.constexpr, mask=None):
    return _load_words(words, GROUP).to(tl.int32), peers.generation > 0


@dataclass(frozen=True)
class Emulated:
    """A candidate's time, or why it has none.

    Args:
        timing: of calls in a graph, or eager on the host.
        reason: empty if it was timed.
        promised: whether it was told that weights and the cache are static, and used that.
    """

    candidate: Candidate
    timing: timer.Timing | None
    reason: str = ""
    promised: bool = False


def emulate(
    fabric: Fabric,
    op: str,
    problem: dict[str, Any],
    candidates: Sequence[Candidate],
    arena_bytes: int,
    repetitions: int,
    beside_vendor: bool = False,
    peers: PeersAre = "absent",
) -> list[Emulated]:
    """Time candidates of a problem of more ranks than exist; a task of two workers, or of one.

    Each runs without the promise of static inputs, and with it if that makes a difference.

    Args:
        problem: fields of the operation's problem.
        arena_bytes: of each rank; those of all of them have to fit a slot of the pool.
        beside_vendor: also time the vendor's kernel alone; it comes last, as VENDOR.
        peers: of a single worker; the same in all its tasks.
    """
    fabric = copy.copy(fabric)  # the caller may emulate other problems on it
    if fabric.world_size == 1:
        act_alone_for(fabric, problem["world_size"], arena_bytes, peers)
    else:
        sync.signal, packets.receive = _signal_as_another, _receive_from_two
        _act_for_others(fabric, problem["world_size"], arena_bytes)
    calls = Calls(fabric, op, problem)
    calls.share_compilation(candidates)
    tried = [(each, promised) for each in candidates for promised in promises(each.config)]
    plans = [plan_or_reason(calls, candidate, promised) for candidate, promised in tried]
    mode = "graph" if fabric.has_graphs else "eager"
    timed = [(calls.call(plan), mode) for plan in plans if isinstance(plan, Ready)]
    vendor = vendor_of(calls) if beside_vendor else None
    if vendor is not None:
        timed.append((vendor, mode))
    timings = iter(timer.time_together(fabric, timed, repetitions))
    fabric.synchronize()
    fabric.pool.check()
    found = [
        Emulated(candidate, next(timings), promised=promised)
        if isinstance(plan, Ready)
        else Emulated(candidate, None, plan, promised)
        for (candidate, promised), plan in zip(tried, plans, strict=True)
    ]
    return [*found, *(Emulated(Candidate(VENDOR, {}), timing) for timing in timings)]


def vendor_of(calls: Calls) -> timer.Call | None:
    """The vendor's kernel of an operation, or None; of attention, cuDNN's on a GPU."""
    if calls.op != local_decode.OP:
        return vendor_kernel(calls)
    library = "torch_cudnn" if calls.fabric.has_graphs else "torch_sdpa"
    try:
        return local_decode.PEERS[calls.op][library](calls)
    except TaxfreeError:  # not of a cache with pages
        return None


def act_alone_for(fabric: Fabric, ranks: int, arena_bytes: int, peers: PeersAre = "absent") -> None:
    """Make a fabric of one rank look like one of `ranks`, with such peers in this whole process.

    It must come before any kernel of the process that signals or waits: Triton reads a kernel's
    source once, so a later one would get a wrong place in its cache.
    """
    if peers == "absent":
        sync.wait, packets.receive = _wait_for_nobody, _receive_at_once
    else:
        sync.signal, packets.receive = _signal_itself, _receive_from_itself
    _act_for_others(fabric, ranks, arena_bytes)


def _act_for_others(fabric: Fabric, ranks: int, arena_bytes: int) -> None:
    """Make a fabric of two, or one, look like one of `ranks`, with arenas in a slot of its pool."""
    arenas, _ = fabric.pool.slots(ranks * arena_bytes, torch.uint8)
    begins = fabric.heap_bases + fabric.heap.offset_of(arenas)
    rank = torch.arange(ranks, device=fabric.device)
    own = fabric.rank
    others = begins[(own + 1) % fabric.world_size]
    timeout_s = TIMEOUT_S if fabric.world_size > 1 else _ALONE_TIMEOUT_S
    fabric.heap_bases = torch.where(rank == own, begins[own], others) + rank * arena_bytes
    fabric.heap = SymmetricHeap(arenas[own * arena_bytes : (own + 1) * arena_bytes])
    fabric.world_size = ranks
    fabric.device_barrier = DeviceBarrier(fabric, timeout_s)
    fabric.pool = Pool(fabric, timeout_s=timeout_s)


def plan_or_reason(calls: Calls, candidate: Candidate, promised: bool = False) -> Ready | str:
    """A plan that has run once, or why there is none; the same on both ranks.

    Args:
        promised: whether it may rely on static inputs: none is written once it is made.
    """
    fabric = calls.fabric
    fabric.static_weights = fabric.static_cache = promised
    plan = calls.ready(candidate)
    if isinstance(plan, str):
        return plan
    calls.call(plan)(0)
    hang = calls.hang()
    return plan if hang is None else f"its signals depend on the sender: {hang}"
