"""Small kernels that exchange a message between two ranks, right or broken in one known way."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from taxfree_check.checker import Reason, ScheduleOutcome, SimulatedFabric, Simulation, Violation
from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import SIGNALS, Group, Peers, translate
from taxfree_kernels.device.sync import gdc_launch_dependents, gdc_wait
from taxfree_kernels.launch import Kernel

CALLS = 4
LANES = 16


@triton.jit
def _send(target, data, flag, value, BREAK: tl.constexpr):
    if BREAK == "signal first":
        tl.atomic_xchg(flag, value, sem="release", scope="sys")
        tl.store(target, data)
    else:
        tl.store(target, data)
        if BREAK == "relaxed signal":
            tl.atomic_xchg(flag, value, sem="relaxed", scope="sys")
        elif BREAK == "gpu scope":
            tl.atomic_xchg(flag, value, sem="release", scope="gpu")
        else:
            tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def _await(flag, value, BREAK: tl.constexpr):
    if BREAK == "plain poll":
        while tl.load(flag, volatile=True) < value:
            pass
    elif BREAK == "relaxed poll":
        while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < value:
            pass
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < value:
            pass


@triton.jit
def _exchange(
    data_ptr, inbox_ptr, out_ptr, flag_ptr, control_ptr, heap_bases, rank,
    LANES: tl.constexpr, BREAK: tl.constexpr,
):  # fmt: skip
    """Program 0 sends, the others receive."""
    program = tl.program_id(0)
    if BREAK == "late generation":
        sync.leave(control_ptr)
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    lanes = tl.arange(0, LANES)
    slot = generation % 2
    if BREAK == "one slot":
        slot = generation % 1
    inbox = inbox_ptr + slot * LANES + lanes
    value = generation
    if BREAK == "constant flag":
        value = generation * 0 + 1
    if program == 0:
        peer = 1 - rank
        target = translate(inbox, peers, peer)
        flag = translate(flag_ptr, peers, peer)
        _send(target, tl.load(data_ptr + lanes), flag, value, BREAK)
    else:
        _await(flag_ptr, value, BREAK)
        tl.store(out_ptr + program * LANES + lanes, tl.load(inbox))
    if BREAK != "late generation":
        sync.leave(control_ptr)


@triton.jit
def _relay(data_ptr, box_ptr, out_ptr, flag_ptr, control_ptr, SENDER: tl.constexpr):
    """One program of a rank hands a value to another of the same rank."""
    generation = sync.running_generation(control_ptr)
    if tl.program_id(0) == SENDER:
        tl.store(box_ptr, tl.load(data_ptr))
        tl.atomic_xchg(flag_ptr, generation, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="gpu") < generation:
            pass
        tl.store(out_ptr, tl.load(box_ptr))
    sync.leave(control_ptr)


@triton.jit
def _handshake(flag_ptr, control_ptr, heap_bases, rank, WAITS_FIRST: tl.constexpr):
    """Ranks tell each other that they are there."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    flag = translate(flag_ptr, peers, 1 - rank)
    if WAITS_FIRST:
        _await(flag_ptr, generation, "")
    tl.atomic_xchg(flag, generation, sem="release", scope="sys")
    _await(flag_ptr, generation, "")
    sync.leave(control_ptr)


@triton.jit
def _one_way(
    data_ptr, inbox_ptr, out_ptr, flag_ptr, control_ptr, heap_bases, rank,
    SIGNALS_EMPTY: tl.constexpr, AWAITS_EMPTY: tl.constexpr,
):  # fmt: skip
    """Rank 0 sends to rank 1; rank 1 has nothing to send, and should say so."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    slot = inbox_ptr + generation % 2
    flag = translate(flag_ptr, peers, 1 - rank)
    if rank == 0:
        tl.store(translate(slot, peers, 1), tl.load(data_ptr))
        tl.atomic_xchg(flag, generation, sem="release", scope="sys")
        if AWAITS_EMPTY:
            _await(flag_ptr, generation, "")
    else:
        if SIGNALS_EMPTY:
            tl.atomic_xchg(flag, generation, sem="release", scope="sys")
        _await(flag_ptr, generation, "")
        tl.store(out_ptr, tl.load(slot))
    sync.leave(control_ptr)


@triton.jit
def _flag_in_data(
    data_ptr, words_ptr, slot_words, out_ptr, control_ptr, heap_bases, rank,
    LANES: tl.constexpr, BREAK: tl.constexpr,
):  # fmt: skip
    """Words of 8 bytes carry 4 bytes of payload and their generation."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    lanes = tl.arange(0, LANES)
    slot = generation % (1 if BREAK == "one slot" else 2)
    words = words_ptr + slot * slot_words + lanes
    target = translate(words, peers, 1 - rank)
    payload = tl.load(data_ptr + lanes).to(tl.int64)
    flag = generation * 0 + 1 if BREAK == "constant flag" else generation & 0x7FFFFFFF
    if BREAK == "torn":
        halves = tl.cast(target, tl.pointer_type(tl.int32))
        tl.store(halves, payload.to(tl.int32))
        tl.store(halves + 1, (payload * 0 + flag).to(tl.int32))
    else:
        tl.store(target, (flag << 32) | payload)
    seen = tl.load(words, volatile=True)
    if BREAK == "one word":
        while tl.max(seen >> 32, 0) != flag:
            seen = tl.load(words, volatile=True)
    else:
        while (tl.min(seen >> 32, 0) != flag) | (tl.max(seen >> 32, 0) != flag):
            seen = tl.load(words, volatile=True)
    tl.store(out_ptr + lanes, (seen & 0xFFFF).to(tl.float32))
    sync.leave(control_ptr)


@triton.jit
def _told_by_words(
    data_ptr, words_ptr, slot_words, out_ptr, control_ptr, heap_bases, rank,
    GROUP: tl.constexpr, LANES: tl.constexpr, BREAK: tl.constexpr,
):  # fmt: skip
    """Words that say that other data is there, which is what they cannot say."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    lanes = tl.arange(0, LANES)
    words = words_ptr + generation % 2 * slot_words + lanes
    box = control_ptr + SIGNALS + LANES + generation % 2
    tl.store(translate(box, peers, 1 - rank), generation)
    target = translate(words, peers, 1 - rank)
    packets.send(peers, target, lanes, 1 - rank)
    packets.receive(peers, words, 1 - rank, GROUP)
    tl.store(out_ptr, tl.load(box).to(tl.float32))
    sync.leave(control_ptr)


@triton.jit
def _stored_by_both(
    box_ptr, counter_ptr, words_ptr, slot_words, control_ptr, heap_bases, rank,
    GROUP: tl.constexpr, LANES: tl.constexpr, OWNER: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    """Rank 1 stores where rank 0 has stored, once words show that rank 0 has released since."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    lanes = tl.arange(0, LANES)
    words = words_ptr + generation % 2 * slot_words + lanes
    box = translate(box_ptr, peers, OWNER)
    if rank == 0:
        tl.store(box, 1.0)
        tl.atomic_add(counter_ptr, 1, sem="release", scope=SCOPE)
    packets.send(peers, translate(words, peers, 1 - rank), lanes, 1 - rank)
    packets.receive(peers, words, 1 - rank, GROUP)
    if rank == 1:
        tl.store(box, 2.0)
    sync.leave(control_ptr)


@triton.jit
def _first_of_two(data_ptr, box_ptr, GROUP: tl.constexpr):
    gdc_launch_dependents(GROUP)
    tl.store(box_ptr + tl.program_id(0), tl.load(data_ptr + tl.program_id(0)))


@triton.jit
def _second_of_two(
    box_ptr, out_ptr, control_ptr,
    GROUP: tl.constexpr, LANES: tl.constexpr, BREAK: tl.constexpr,
):  # fmt: skip
    """Hands on what the kernel before, which may not have ended, stores."""
    lanes = tl.arange(0, LANES)
    sync.running_generation(control_ptr)
    if BREAK != "waits late":
        gdc_wait(GROUP)
    loaded = tl.load(box_ptr + lanes)
    if BREAK == "waits late":
        gdc_wait(GROUP)
    tl.store(out_ptr + tl.program_id(0) * LANES + lanes, loaded)
    sync.leave(control_ptr)


def early(broken: str = "", seed: int = 0) -> ScheduleOutcome:
    """A kernel that may begin before the one before it has ended."""
    group = Group(2, "cuda")  # the only backend with early kernels
    first = Kernel(_first_of_two, 3, {"GROUP": group})
    second = Kernel(_second_of_two, 2, {"GROUP": group, "LANES": 2, "BREAK": broken})

    def setup(fabric: SimulatedFabric) -> list:
        data, box, out = torch.ones(4), torch.zeros(4), torch.zeros(4)

        def call() -> None:
            first(data, box)
            second(box, out, fabric.pool.control)

        return [call] * CALLS

    return Simulation(2).run(setup, seed)


def exchange(broken: str = "", seed: int = 0) -> ScheduleOutcome:
    constants = {"LANES": LANES, "BREAK": broken}
    return _run(_exchange, 3, constants, seed, heap_bases=True)


def relay(sender: int, seed: int = 0) -> ScheduleOutcome:
    return _run(_relay, 2, {"SENDER": sender}, seed, heap_bases=False)


def one_way(*, signals_empty: bool, awaits_empty: bool, seed: int = 0) -> ScheduleOutcome:
    constants = {"SIGNALS_EMPTY": signals_empty, "AWAITS_EMPTY": awaits_empty}
    return _run(_one_way, 1, constants, seed, heap_bases=True)


def flag_in_data(broken: str = "", seed: int = 0) -> ScheduleOutcome:
    """In the last call's output is what was received in it, if nothing is wrong."""
    constants = {"LANES": LANES, "BREAK": broken}
    if broken == "other data":
        group = Group(2, "interpreter")
        kernel = Kernel(_told_by_words, 1, constants | {"GROUP": group})
    else:
        kernel = Kernel(_flag_in_data, 1, constants)
    outputs = []

    def setup(fabric: SimulatedFabric) -> list:
        words, slot_words = fabric.pool.ll_slots(LANES)
        ends = (fabric.pool.control, fabric.heap_bases, fabric.rank)

        def call(number: int) -> None:
            data, out = torch.full((LANES,), 10.0 * fabric.rank + number), torch.zeros(LANES)
            kernel(data, words, slot_words, out, *ends)
            outputs.append((fabric.rank, number, out))

        return [lambda number=number: call(number) for number in range(CALLS)]

    outcome = Simulation(2).run(setup, seed)
    wrong = [out for rank, number, out in outputs if not (out == 10.0 * (1 - rank) + number).all()]
    if outcome.violation is None and wrong:
        return replace(outcome, violation=Violation(Reason.WRONG_RESULT, (str(wrong[0]),)))
    return outcome


def stored_by_both(*, owner: int, scope: str, seed: int = 0) -> ScheduleOutcome:
    """Rank 0 releases to `scope`, rank 1 stores to the same memory, which is of rank `owner`."""
    constants = {"GROUP": Group(2, "interpreter"), "LANES": LANES, "OWNER": owner, "SCOPE": scope}

    def setup(fabric: SimulatedFabric) -> list:
        kernel = Kernel(_stored_by_both, 1, constants)
        boxes = fabric.heap.empty(CALLS, torch.float32)
        counter = torch.zeros(1, dtype=torch.int32)
        words = fabric.pool.ll_slots(LANES)
        ends = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        return [lambda box=box: kernel(box, counter, *words, *ends) for box in boxes.split(1)]

    return Simulation(2).run(setup, seed)


def handshake(*, waits_first: bool, seed: int = 0) -> ScheduleOutcome:
    def setup(fabric: SimulatedFabric) -> list:
        kernel = Kernel(_handshake, 1, {"WAITS_FIRST": waits_first})
        flag = fabric.heap.empty(1, torch.int64).zero_()
        args = (flag, fabric.pool.control, fabric.heap_bases, fabric.rank)
        return [lambda: kernel(*args)] * CALLS

    return Simulation(2).run(setup, seed)


def host_cleared_flag(*, barriers: bool, seed: int = 0) -> ScheduleOutcome:
    """A flag of constant value that the host clears before each call."""

    def setup(fabric: SimulatedFabric) -> list:
        kernel = Kernel(_exchange, 3, {"LANES": LANES, "BREAK": "constant flag"})
        inbox = fabric.heap.empty(2 * LANES, torch.float32)
        flag = fabric.heap.empty(1, torch.int64).zero_()
        data, out = torch.ones(LANES), torch.empty(3 * LANES)
        pool = fabric.pool.control

        def call() -> None:
            if barriers:
                fabric.barrier()
            flag.zero_()
            if barriers:
                fabric.barrier()
            kernel(data, inbox, out, flag, pool, fabric.heap_bases, fabric.rank)

        return [call] * CALLS

    return Simulation(2).run(setup, seed)


def _run(
    function: object,
    grid: int,
    constants: dict,
    seed: int,
    *,
    heap_bases: bool,
) -> ScheduleOutcome:
    kernel = Kernel(function, grid, constants)

    def setup(fabric: SimulatedFabric) -> list:
        box = fabric.heap.empty(2 * LANES, torch.float32).zero_()
        flag = fabric.heap.empty(1, torch.int64).zero_()
        ends = (fabric.heap_bases, fabric.rank) if heap_bases else ()

        def call(number: int) -> None:
            data = torch.full((LANES,), 10.0 * fabric.rank + number)
            out = torch.empty(3 * LANES)
            kernel(data, box, out, flag, fabric.pool.control, *ends)

        return [lambda number=number: call(number) for number in range(CALLS)]

    return Simulation(2).run(setup, seed)
