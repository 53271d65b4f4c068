"""Kernels and tasks that use the synchronisation primitives alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import ABORT, CHANNELS, SIGNALS, Group, Peers, translate
from taxfree_kernels.errors import PeerTimeout
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, compiling
from tests.kernels.tasks import Case, Inputs, everybodys, private


@triton.jit
def _generations(control_ptr, out_ptr):
    tl.store(out_ptr + tl.program_id(0), sync.running_generation(control_ptr))
    sync.leave(control_ptr)


@triton.jit(do_not_specialize=["rank", "peer", "channel", "generation"])
def _signal(
    control_ptr, bases, rank, peer, channel, generation, data_ptr,
    GROUP: tl.constexpr,
):  # fmt: skip
    peers = Peers(control_ptr, bases, rank, generation)
    target = translate(data_ptr, peers, peer)
    tl.store(target, 100 * rank + generation)
    sync.signal(peers, channel, peer, GROUP)


@triton.jit(do_not_specialize=["rank", "generation"])
def _signal_some(
    control_ptr, bases, rank, generation, mask_ptr,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    peers = Peers(control_ptr, bases, rank, generation)
    lane = tl.arange(0, LANES)
    mask = (lane < GROUP.WORLD) & (tl.load(mask_ptr + lane, mask=lane < GROUP.WORLD, other=0) != 0)
    sync.signal(peers, 1, lane % GROUP.WORLD, GROUP, mask=mask)


@triton.jit(do_not_specialize=["rank", "source", "channel", "generation"])
def _wait(
    control_ptr, bases, rank, source, channel, generation, out_ptr,
    GROUP: tl.constexpr,
):  # fmt: skip
    peers = Peers(control_ptr, bases, rank, generation)
    arrived = sync.wait(peers, channel, source, GROUP)
    tl.store(out_ptr, arrived.to(tl.int32))


@triton.jit(do_not_specialize=["rank", "generation"])
def _wait_some(
    control_ptr, bases, rank, generation, mask_ptr, out_ptr,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    peers = Peers(control_ptr, bases, rank, generation)
    lane = tl.arange(0, LANES)
    inside = lane < 2 * GROUP.WORLD  # channels 0 and 1 of every source
    mask = inside & (tl.load(mask_ptr + lane, mask=inside, other=0) != 0)
    arrived = sync.wait(peers, lane // GROUP.WORLD % 2, lane % GROUP.WORLD, GROUP, mask=mask)
    tl.store(out_ptr, arrived.to(tl.int32))


@triton.jit(do_not_specialize=["programs"])
def _arrive(counter_ptr, out_ptr, programs, GROUP: tl.constexpr):
    last = sync.arrive(counter_ptr, programs, GROUP)
    tl.store(out_ptr + tl.program_id(0), last.to(tl.int32))


@triton.jit(do_not_specialize=["rank", "slot_words"])
def _exchange_words(
    control_ptr, words_ptr, slot_words, bases, rank, receivers_ptr, sources_ptr, out_ptr,
    GROUP: tl.constexpr, LANES: tl.constexpr, LAMPORT: tl.constexpr,
):  # fmt: skip
    """Send 100 rank + lane - 1 to each receiver, and note what each source has sent."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, bases, rank, generation)
    number = generation % 2
    if LAMPORT:
        turn = packets.running_turn(control_ptr)
        number = turn % 3
    slot = tl.multiple_of(words_ptr + number * slot_words, 16)
    lane = tl.arange(0, LANES)
    own = translate(slot + rank.to(tl.int64) * LANES, peers, rank)
    for peer in range(GROUP.WORLD):
        if tl.load(receivers_ptr + peer) != 0:
            target = translate(own, peers, peer)
            payload = (100 * rank + lane - 1).to(tl.int32)
            packets.send(peers, target + lane, payload, peer)
    if LAMPORT:
        packets.empty_last_turn(control_ptr, words_ptr, slot_words, turn, GROUP.WORLD * LANES, 0, 1)
    source = tl.minimum(tl.arange(0, triton.next_power_of_2(GROUP.WORLD)), GROUP.WORLD - 1)[:, None]
    payload, arrived = packets.receive(
        peers, slot + source * LANES + lane[None, :], source, GROUP,
        mask=tl.load(sources_ptr + source) != 0,
    )  # fmt: skip
    tl.store(out_ptr, arrived.to(tl.int32))
    tl.store(out_ptr + 1 + source * LANES + lane[None, :], payload)
    if LAMPORT:
        packets.leave_turn(control_ptr)
    sync.leave(control_ptr)


class Words:
    """The primitives on one fabric's pool, called from Python; a wait returns when it has ended."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.pool = fabric, fabric.pool
        constants = {"GROUP": Group(fabric.world_size, fabric.backend)}
        self._signal, self._wait = (Kernel(each, 1, constants) for each in (_signal, _wait))
        self._signal_some = Kernel(_signal_some, 1, constants | {"LANES": 4})
        self._wait_some = Kernel(_wait_some, 1, constants | {"LANES": 8})
        self.to = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        self.data = fabric.pool.slots(16, torch.int64)[0]
        with compiling():  # so that waits, which are timed, find their kernel ready
            self.wait(0, 0, 1)
            self.wait_some([], 1)

    def signal(self, peer: int, channel: int, generation: int) -> None:
        self._signal(*self.to, peer, channel, generation, self.data[self.fabric.rank :])

    def signal_some(self, peers: Sequence[int], generation: int) -> None:
        mask = [peer in peers for peer in range(self.fabric.world_size)]
        self._signal_some(*self.to, generation, self._words(mask))

    def wait(self, source: int, channel: int, generation: int) -> tuple[bool, float]:
        out = self._words([-1])
        begin = time.monotonic()
        self._wait(*self.to, source, channel, generation, out)
        return bool(out[0]), time.monotonic() - begin

    def wait_some(self, lanes: Sequence[tuple[int, int]], generation: int) -> bool:
        """Wait for several (channel, source) in one poll."""
        pairs = [
            (channel, source) for channel in (0, 1) for source in range(self.fabric.world_size)
        ]
        out = self._words([-1])
        self._wait_some(*self.to, generation, self._words([p in lanes for p in pairs]), out)
        return bool(out[0])

    def _words(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.fabric.device)

    def word(self, channel: int, source: int) -> int:
        at = SIGNALS.value + channel * self.fabric.world_size + source
        return int(self.pool.control[at])


def generations(fabric: Fabric, grids: Sequence[int], first: int) -> list[list[int]]:
    """The generation that each program of successive calls sees."""
    with private(fabric) as own:
        own.pool.reset(first)
        found = []
        for grid in grids:
            out = torch.zeros(grid, dtype=torch.int64, device=own.device)
            Kernel(_generations, grid)(own.pool.control, out)
            found.append(out.tolist())
        return found


def arrivals(fabric: Fabric, programs: Sequence[int]) -> list[tuple[list[int], int]]:
    """Who of successive launches was last, and what the counter is afterwards."""
    counter = torch.zeros(1, dtype=torch.int32, device=fabric.device)
    found = []
    for count in programs:
        out = torch.full((count,), -1, dtype=torch.int32, device=fabric.device)
        Kernel(_arrive, count, {"GROUP": Group(fabric.world_size, fabric.backend)})(
            counter, out, count
        )
        found.append((out.tolist(), int(counter[0])))
    return found


def messages(fabric: Fabric, rounds: int) -> list[Any]:
    """Each rank sends to its right neighbour, which waits; what it then finds."""
    with private(fabric) as own:
        words = Words(own)
        right, left = (own.rank + 1) % own.world_size, (own.rank - 1) % own.world_size
        found = []
        for generation in range(1, rounds + 1):
            time.sleep(0.01 * ((own.rank + generation) % own.world_size))
            words.signal(right, 5, generation)
            arrived, _ = words.wait(left, 5, generation)
            found.append((arrived, int(words.data[left]) - 100 * left >= generation))
        own.barrier()
        touched = [
            (channel, source)
            for channel in range(CHANNELS)
            for source in range(own.world_size)
            if words.word(channel, source)
        ]
        return [found, touched, words.word(5, left)]


def masks(fabric: Fabric) -> dict[str, Any]:
    """Vector signals and waits touch the lanes of their mask only."""
    with private(fabric) as own:
        words = Words(own)
        if own.rank == 0:
            words.signal_some([1], 4)
            words.signal_some([0, 2], 9)
        own.barrier()
        found = {"word": words.word(1, 0), "other": words.word(0, 0)}
        own.barrier()
        if own.rank == 1:
            found["those that came"] = words.wait_some([(1, 0)], 4)
            found["nobody"] = words.wait_some([], 1000)
            own.pool.check()
        return found


def later_generations(fabric: Fabric, word: int, wanted: Sequence[int]) -> list[bool]:
    """Whether waits for these generations end at once with a word of that value."""
    with private(fabric, timeout_s=0.05) as own:
        words = Words(own)
        own.pool.reset(word)
        return [words.wait(own.rank, 0, generation)[0] for generation in wanted]


def timeouts(fabric: Fabric, timeout_s: float) -> dict[str, Any]:
    """Rank 0 waits for rank 2, which never comes; rank 1 waits afterwards, for rank 0."""
    with private(fabric, timeout_s=timeout_s) as own:
        words = Words(own)
        found: dict[str, Any] = {}
        if own.rank == 0:
            found["first wait"] = words.wait(2, 3, 7)
            found["next wait"] = words.wait(1, 3, 7)
        own.barrier()
        if own.rank == 1:
            found["peer's wait"] = words.wait(0, 3, 7)
        found["aborted"] = bool(own.pool.control[ABORT.value])
        found["errors"] = [_error(own), _error(own)]
        own.pool.reset()
        found["after the reset"] = _error(own)
        words.signal((own.rank + 1) % own.world_size, 3, 1)
        found["works again"] = words.wait((own.rank - 1) % own.world_size, 3, 1)[0]
        own.barrier()
        return found


class Exchanged:
    """Calls that exchange words, 8 between each two ranks: Lamport words, or LL packets."""

    LANES = 8

    def __init__(self, fabric: Fabric, lamport: bool) -> None:
        world = fabric.world_size
        self.fabric = fabric
        constants = {"GROUP": Group(world, fabric.backend), "LANES": self.LANES, "LAMPORT": lamport}
        self._kernel = Kernel(_exchange_words, 1, constants)
        slots = fabric.pool.lamport_slots if lamport else fabric.pool.ll_slots
        self._words, self._slot_words = slots(world * self.LANES)
        with compiling():
            self.call([], [])

    def call(self, receivers: Sequence[int], sources: Sequence[int]) -> tuple[bool, Any]:
        """Whether the words of all sources came, and what the slot holds, [world, lanes]."""
        fabric, world = self.fabric, self.fabric.world_size
        out = torch.full((1 + world * self.LANES,), -1, dtype=torch.int32, device=fabric.device)
        masks = (
            torch.tensor([rank in ranks for rank in range(world)], device=fabric.device).int()
            for ranks in (receivers, sources)
        )
        ends = (fabric.heap_bases, fabric.rank)
        self._kernel(fabric.pool.control, self._words, self._slot_words, *ends, *masks, out)
        return bool(out[0]), out[1:].view(world, self.LANES).tolist()


def exchanged_words(fabric: Fabric, first: int, calls: int, lamport: bool) -> list[bool]:
    """Whether each of successive calls gets the words of that call from everybody."""
    with private(fabric) as own:
        own.pool.reset(first)
        words, everybody = Exchanged(own, lamport), range(own.world_size)
        wanted = [[100 * rank + lane - 1 for lane in range(8)] for rank in everybody]
        if lamport:
            wanted[0][0] = 0x7FFFFFFF  # in the place of what would be EMPTY
        found = []
        for call in range(calls):
            time.sleep(0.01 * ((own.rank + call) % own.world_size))
            found.append(words.call(everybody, everybody) == (True, wanted))
        own.barrier()
        return found


def missing_words(fabric: Fabric, timeout_s: float, lamport: bool) -> dict[str, Any]:
    """Rank 2 sends nothing to rank 0, whose wait does not mind at first; then all is as before."""
    with private(fabric, timeout_s=timeout_s) as own:
        words = Exchanged(own, lamport)
        receivers = [0, 1, 2] if own.rank != 2 else [1, 2]
        found = {"masked": words.call(receivers, [0, 1])[0], "first error": _error(own)}
        own.barrier()
        found["all"] = words.call(receivers, [0, 1, 2] if own.rank == 0 else [])[0]
        own.barrier()
        found["error"] = _error(own)
        found["aborted"] = bool(own.pool.control[ABORT.value])
        own.pool.reset()
        found["works again"] = words.call([0, 1, 2], [0, 1, 2])[0]
        own.barrier()
        return found


def missing_lanes(fabric: Fabric, told: list[tuple[int, int]], timeout_s: float) -> str | None:
    """What rank 0 reports when of lanes (channel, source) only those that are told arrive."""
    with private(fabric, timeout_s=timeout_s) as own:
        words = Words(own)
        for channel, source in told:
            if own.rank == source:
                words.signal(0, channel, 3)
        own.barrier()
        if own.rank == 0:
            words.wait_some([(0, 1), (1, 1), (0, 2), (1, 2)], 3)
        return _error(own)


def absent_peer(fabric: Fabric, case: Case, timeout_s: float) -> dict[str, Any]:
    """Outputs of ranks whose peer, the last rank, does not call; and after a reset."""
    with private(fabric, timeout_s=timeout_s) as own:
        plan, inputs = case.plan(own), Inputs(own, case, seed=1, integers=True)
        problem = case.problem(own.world_size)
        exact = inputs.exact.to(inputs.tensors[0].dtype)
        found: dict[str, Any] = {}
        if own.rank != own.world_size - 1:
            out = inputs.run(plan)
            found["error"] = _error(own)
            missing = out
            if getattr(problem, "gather_dim", 1) == 0:  # other rows do not depend on that rank
                missing = out[(own.world_size - 1) * problem.shard_rows :]
            found["NaN"] = bool(missing.isnan().all())
            found["neither right nor NaN"] = int(((out != exact) & ~out.isnan()).sum())
        everybodys(own, None)
        own.pool.bound_waits(30.0)  # a busy machine is no fault
        found["right after the reset"] = [bool((inputs.run(plan) == exact).all()) for _ in range(3)]
        found["error after the reset"] = _error(own)
        return found


def _error(fabric: Fabric) -> str | None:
    fabric.synchronize()
    try:
        fabric.pool.check()
    except PeerTimeout as error:
        return error.message
    return None
