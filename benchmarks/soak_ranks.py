"""The soak on the ranks: calls in random order, pauses, changing inputs, outputs compared.

All work between two calls is on the device. Before a call, one kernel copies the inputs that a
caller may promise to be static, of one of a few sets, and another the set's other inputs. The
second lets the call's kernel begin early, pauses, and poisons the output. After the call, a kernel
compares the output with the set's result. The set and each rank's pauses are drawn from the number
of the call in device memory, so each replay of a graph draws new ones.

So the promise of static inputs holds: an ordinary kernel lies between their copy and the call. What
is not promised is written while the call's kernel may have begun.

In a chain nothing lies between calls. Each call has its own output and reads one of the sets, which
nobody writes; all outputs are compared when the chain has ended.

Inputs are small integers, whose sums are exact in any order: one different value is a mismatch.
Results are computed on the CPU, because ranks that share a GPU through NVIDIA's multi-process
service got wrong products from cuBLAS.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from functools import cached_property, partial
from random import Random
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree._runtime.collectives import Failure
from taxfree._runtime.ready import ready_plans
from taxfree.fingerprints import rows_field
from taxfree_check.cross_compile.record import record
from taxfree_check.cross_compile.screen import Screen
from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import LIMIT, Group
from taxfree_kernels.device.sync import gdc_launch_dependents
from taxfree_kernels.fabric.base import Fabric, aligned
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, launch_normally, launching_through
from taxfree_kernels.variant import (
    MatmulProblem,
    Plan,
    Ready,
    Variant,
    op_of,
    operation,
    operation_names,
    operation_shapes,
    variants,
)
from taxfree_tune.measuring.timer import capturing

SETS = 16  # of inputs, for each problem
_TIMES_K = 8  # sums of so many small integers are exact in bfloat16
GRAPH_CALLS = 200
GRAPHS = 2  # captured orders of calls, for each choice of members
MOST_LOADS = 64  # of a pause, one after another
MOST_LOADS_INSIDE = 16  # of a pause inside a kernel, where many programs pause
_BLOCK = 4096  # elements that a program copies or compares at a time
_COPIERS = 8  # programs that copy inputs, at most
_CPU = torch.device("cpu")
#: operation -> inputs that a caller may promise to be static: see :func:`taxfree.init`
_STATIC = {"flash_decode": range(1, 5), "attention": range(0)}
_WEIGHT = range(1, 2)  # of other operations

# -- kernels ------------------------------------------------------------------------------------

_INSIDE = tl.constexpr(MOST_LOADS_INSIDE)
_ROUNDS = tl.constexpr(4)  # of the generator: enough for calls to be unlike


@triton.jit
def _draw(stream, number):
    """A random number >= 0: the `number`-th of a stream."""
    return (tl.randint(stream, number, _ROUNDS) & 0x7FFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["loads"])
def _load(word_ptr, loads):
    """Load a non-negative word `loads` times, one after another."""
    seen = tl.cast(0, tl.int64)
    for _ in range(loads):
        # The address depends on the last load, though the offset is always 0.
        seen = tl.load(word_ptr + (seen < 0).to(tl.int32), volatile=True)


@triton.jit
def _pause(word_ptr, stream, number, MOST: tl.constexpr):
    """Load a word up to MOST times; half of the time not at all."""
    _load(word_ptr, _draw(stream, number) % (2 * MOST) - MOST)


@triton.jit(do_not_specialize=["stream"])
def _pause_between(call_ptr, stream, MOST: tl.constexpr):
    _pause(call_ptr, stream, tl.load(call_ptr), MOST)


@triton.jit(do_not_specialize=["seed", "stream", "words", "elements"])
def _begin(
    call_ptr, rows_ptr, inputs_ptr, words, out_ptr, elements, seed, stream,
    GROUP: tl.constexpr, LAUNCH_NEXT: tl.constexpr, SETS: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Pause, put one row of `rows_ptr` in the place of the inputs, fill the output with NaN.

    Args:
        call_ptr: int64, the number of the call.
        rows_ptr: int32 [SETS, words]; inputs_ptr: int32 [words].
        out_ptr: [elements].
        seed, stream: random streams of all ranks together, and of this rank.
        LAUNCH_NEXT: let the next kernel begin before all that.
    """
    if LAUNCH_NEXT:
        gdc_launch_dependents(GROUP)
    call = tl.load(call_ptr)
    _pause(call_ptr, stream, call, MOST)
    row_ptr = rows_ptr + (_draw(seed, call) % SETS).to(tl.int64) * words
    first, stride = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for begin in range(first, words, stride):
        offsets = begin + tl.arange(0, BLOCK)
        tl.store(
            inputs_ptr + offsets,
            tl.load(row_ptr + offsets, mask=offsets < words),
            mask=offsets < words,
        )
    nothing = tl.full((BLOCK,), float("nan"), tl.float32).to(out_ptr.dtype.element_ty)
    for begin in range(first, elements, stride):
        offsets = begin + tl.arange(0, BLOCK)
        tl.store(out_ptr + offsets, nothing, mask=offsets < elements)


@triton.jit(do_not_specialize=["seed", "elements", "member", "chosen"])
def _end(
    call_ptr, results_ptr, out_ptr, elements, seed, wrong_ptr, first_ptr, member, chosen,
    SETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compare the output with the result of its set, count a mismatch, and count the call.

    Args:
        results_ptr: [SETS, elements].
        wrong_ptr, first_ptr: int64 [members]: mismatches, and the number of the first such call.
        chosen: the set; negative if it was drawn.
    """
    call = tl.load(call_ptr)
    number = tl.where(chosen < 0, _draw(seed, call) % SETS, chosen)
    result_ptr = results_ptr + number.to(tl.int64) * elements
    differs = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, elements, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        outputs = tl.load(out_ptr + offsets, mask=offsets < elements, other=0.0).to(tl.float32)
        wanted = tl.load(result_ptr + offsets, mask=offsets < elements, other=0.0).to(tl.float32)
        differs += (outputs != wanted).to(tl.int32)
    if tl.max(differs, 0) > 0:
        wrong = tl.load(wrong_ptr + member)
        if wrong == 0:
            tl.store(first_ptr + member, call)
        tl.store(wrong_ptr + member, wrong + 1)
    tl.store(call_ptr, call + 1)


# -- pauses inside kernels ----------------------------------------------------------------------

_signal, _wait, _send, _receive = sync.signal, sync.wait, packets.send, packets.receive


@triton.jit
def _pause_inside(peers):
    number = peers.generation * 4096 + tl.program_id(0)
    _pause(peers.control_ptr + LIMIT, peers.rank, number, _INSIDE)


@triton.jit
def _late_signal(peers, channel, peer, GROUP: tl.constexpr, mask=None):
    _pause_inside(peers)
    _signal(peers, channel, peer, GROUP, mask=mask)


@triton.jit
def _late_wait(peers, channel, source, GROUP: tl.constexpr, mask=None):
    arrived = _wait(peers, channel, source, GROUP, mask=mask)
    _pause_inside(peers)
    return arrived


@triton.jit
def _late_send(peers, words, payload, peer, mask=None):
    _pause_inside(peers)
    _send(peers, words, payload, peer, mask=mask)


@triton.jit
def _late_receive(peers, words, source, GROUP: tl.constexpr, mask=None):
    payload, arrived = _receive(peers, words, source, GROUP, mask=mask)
    _pause_inside(peers)
    return payload, arrived


@contextlib.contextmanager
def pausing_inside() -> Iterator[None]:
    """Make programs pause between data and signal, and between wait and use.

    Kernels that are already compiled in this process do not change.
    """
    sync.signal, sync.wait = _late_signal, _late_wait
    packets.send, packets.receive = _late_send, _late_receive
    try:
        yield
    finally:
        sync.signal, sync.wait, packets.send, packets.receive = _signal, _wait, _send, _receive


# -- members -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """One plan of a soak: a variant with a config on a problem.

    Args:
        promised: whether the caller promises that weights and caches are static.
    """

    op: str
    problem: Any
    variant: str
    config: dict[str, Any]
    promised: bool = False


@dataclass(frozen=True)
class Stretch:
    """The outcome of back-to-back calls on one rank.

    Args:
        seconds: from a barrier until this rank was done.
        calls, mismatches: by member.
        first_mismatch: number of the call, by member; -1 for none.
    """

    seconds: float
    calls: list[int]
    mismatches: list[int]
    first_mismatch: list[int]


_Tensors = Sequence[torch.Tensor | None]


class _Bank:
    """The sets of inputs of a problem with their results, and the buffers of calls.

    Attributes:
        parts: of the inputs, those that may be promised to be static and the others: int32
            [SETS, words] of all sets, and int32 [words] of the set of a call.
        inputs: of a call, in the memory of `parts`.
        sets: the inputs of each set.
    """

    def __init__(self, fabric: Fabric, op: str, problem: Any) -> None:
        of_op, rank, device = operation(op), fabric.rank, fabric.device
        made = [of_op.make_inputs(problem, rank, s, _CPU, integers=True) for s in range(SETS)]
        results = [of_op.reference(problem, rank, s, _CPU, integers=True) for s in range(SETS)]
        self.size = getattr(problem, rows_field(op))
        self.out = of_op.empty_output(problem, device)
        self.results = torch.stack(results).to(self.out.dtype).to(device)
        static = _STATIC.get(op, _WEIGHT)
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.inputs: tuple[torch.Tensor | None, ...] = (None,) * len(made[0])
        self.sets: list[tuple[torch.Tensor | None, ...]] = [self.inputs] * SETS
        for is_static in (True, False):
            part = [_only(tensors, static, is_static) for tensors in made]
            rows = torch.stack([_packed(tensors) for tensors in part]).to(device)
            row = torch.empty_like(rows[0])
            self.parts.append((rows, row))
            self.inputs = _either(self.inputs, _unpacked(row, part[0]))
            self.sets = [
                _either(before, _unpacked(packed, tensors))
                for before, packed, tensors in zip(self.sets, rows, part, strict=True)
            ]

    @cached_property
    def chained(self) -> torch.Tensor:
        """The outputs of a chain's calls, each in its place."""
        return torch.stack([self.out] * GRAPH_CALLS)


def _only(tensors: _Tensors, static: range, is_static: bool) -> list[torch.Tensor | None]:
    """The static tensors or the others, with None in the places of the rest."""
    return [
        tensor if (index in static) == is_static else None for index, tensor in enumerate(tensors)
    ]


def _either(some: _Tensors, others: _Tensors) -> tuple[torch.Tensor | None, ...]:
    return tuple([a if b is None else b for a, b in zip(some, others, strict=True)])


def _packed(tensors: _Tensors) -> torch.Tensor:
    """The storages of tensors, one behind the other and aligned, as int32."""
    parts = [torch.empty(0, dtype=torch.uint8)]
    for tensor in tensors:
        if tensor is not None:
            storage = parts[0].new_empty(0).set_(tensor.untyped_storage())
            parts += [storage, storage.new_zeros(aligned(storage.numel()) - storage.numel())]
    return torch.cat(parts).view(torch.int32)


def _unpacked(row: torch.Tensor, like: _Tensors) -> tuple[torch.Tensor | None, ...]:
    """Tensors with the layouts of the packed ones, in the memory of `row`."""
    unpacked: list[torch.Tensor | None] = []
    begin, row = 0, row.view(torch.uint8)
    for tensor in like:
        if tensor is None:
            unpacked.append(None)
            continue
        size = tensor.untyped_storage().nbytes()
        storage = row[begin : begin + size].view(tensor.dtype)
        offset = storage.storage_offset() + tensor.storage_offset()
        unpacked.append(storage.as_strided(tensor.shape, tensor.stride(), offset))
        begin += aligned(size)
    return tuple(unpacked)


class _Caller:
    """A member's plan with the kernels before, between and after its own.

    Args:
        counters: the number of the call; mismatches and the first one, by member.
        streams: of random numbers: one that all ranks share, three of this rank alone.
    """

    def __init__(
        self,
        fabric: Fabric,
        plan: Ready,
        bank: _Bank,
        member: int,
        counters: tuple[torch.Tensor, ...],
        streams: tuple[int, int, int, int],
    ) -> None:
        self.plan, self.bank = plan, bank
        call, wrong, first = counters
        shared, before, early, between = streams
        group = {"GROUP": Group(fabric.world_size, fabric.backend)}
        sizes = {"BLOCK": _BLOCK, "SETS": SETS}
        self._begin: list[Callable[[], object]] = []
        for (rows, row), poisoned in zip(bank.parts, (0, bank.out.numel()), strict=True):
            blocks = max(1, -(-max(row.numel(), poisoned) // _BLOCK))
            constants = {"LAUNCH_NEXT": poisoned > 0, "MOST": MOST_LOADS, **group, **sizes}
            begin = Kernel(_begin, min(blocks, _COPIERS), constants)
            stream = early if poisoned else before
            self._begin.append(
                partial(begin, call, rows, row, row.numel(), bank.out, poisoned, shared, stream)
            )
        self._pause = partial(Kernel(_pause_between, 1, {"MOST": MOST_LOADS}), call, between)
        compare = Kernel(_end, 1, sizes)
        elements = bank.out.numel()

        def end(out: torch.Tensor, chosen: int) -> None:
            compare(call, bank.results, out, elements, shared, wrong, first, member, chosen)

        self._end = end

    def call(self) -> None:
        """Make one call with its pauses and its comparison."""
        is_first = True

        def launch_after_pause(kernel: Kernel, args: tuple[Any, ...]) -> None:
            nonlocal is_first
            if not is_first:
                Context().run(self._pause)  # a new context: its own kernel is launched at once
            is_first = False
            launch_normally(kernel, args)

        for begin in self._begin:
            begin()
        with launching_through(launch_after_pause):
            self._run()
        self._end(self.bank.out, -1)

    def call_chained(self, chosen: int, index: int) -> None:
        """Make the call at an index of a chain, on the inputs of a set; nothing else."""
        self.plan(*self.bank.sets[chosen], self.bank.chained[index])

    def compare_chained(self, chosen: int, index: int) -> None:
        """Compare the output of such a call."""
        self._end(self.bank.chained[index], chosen)

    def _run(self) -> None:
        self.plan(*self.bank.inputs, self.bank.out)


_Graph = tuple[torch.cuda.CUDAGraph, Counter[int]]  # with how often it calls each member


class Soak:
    """One rank's side: members with their plans, counters on the device, captured graphs.

    Args:
        fabric: of this rank; all members share its pool.
        seed: of configs, of the order of calls and of the draws on the device.
        configs: number per variant and problem: one half seed configs, the default first, the
            other drawn from the space. A config that does not compile is left out. One that needs
            a promise runs with it and without.
        inside: whether programs pause too; for kernels that have not run in this process.
        names: of variants; all if there are none.
        problems: tiny ones of all operations if there are none.
    """

    def __init__(
        self,
        fabric: Fabric,
        seed: int,
        configs: int,
        inside: bool,
        names: Sequence[str] = (),
        problems: Sequence[Any] = (),
    ) -> None:
        self.members: list[Member] = []
        self.left_out: list[tuple[Member, str]] = []
        self._fabric, self._seed, self._random = fabric, seed, Random(seed)
        self._pauses = pausing_inside if inside else contextlib.nullcontext
        self._callers: list[_Caller] = []
        self._banks: dict[Any, _Bank] = {}
        self._graphs: dict[tuple[tuple[int, ...], bool], list[_Graph]] = {}
        with self._pauses():
            tried = problems or _tiny_problems(fabric)
            candidates = list(_candidates(tried, fabric, self._random, configs, names))
            self._call = torch.zeros(2, dtype=torch.int64, device=fabric.device)
            self._wrong = torch.zeros(len(candidates), dtype=torch.int64, device=fabric.device)
            self._first = torch.full_like(self._wrong, -1)
            if fabric.rank == 0 and not inside:
                _compile_ahead(fabric.hardware, candidates)
            self._share_compilation(candidates)
            for member in candidates:
                self._add(member)

    # -- making ready ----------------------------------------------------------------------------

    def _bank(self, member: Member) -> _Bank:
        if member.problem not in self._banks:
            self._banks[member.problem] = _Bank(self._fabric, member.op, member.problem)
        return self._banks[member.problem]

    def _compiled(self, member: Member) -> Plan:
        bank, fabric = self._bank(member), copy.copy(self._fabric)
        fabric.static_weights = fabric.static_cache = member.promised
        plan = _variant(member).plan(member.problem, fabric, member.config)
        plan.compile(bank.size, *bank.inputs, bank.out)
        return plan

    def _share_compilation(self, candidates: Sequence[Member]) -> None:
        """Each rank compiles its share into the compiler's cache, where the others find it."""
        fabric = self._fabric
        fused = [member for member in candidates if _variant(member).fused]
        for member in fused[fabric.rank :: fabric.world_size]:
            with contextlib.suppress(Exception):  # recurs in _add, where all ranks vote
                self._compiled(member)
        fabric.barrier()

    def _add(self, member: Member) -> None:
        """Add a member, if every rank can plan and compile it."""
        plan = ready_plans(self._fabric, [partial(self._compiled, member)])[0]
        if isinstance(plan, Failure):
            self.left_out.append((member, plan.why))
            return
        counters = (self._call, self._wrong, self._first)
        shared, of_rank = 1000 * self._seed, 1000 * self._seed + self._fabric.rank
        streams = (shared, of_rank + 100, of_rank + 300, of_rank + 200)
        self._callers.append(
            _Caller(self._fabric, plan, self._bank(member), len(self.members), counters, streams)
        )
        self.members.append(member)

    # -- calls -----------------------------------------------------------------------------------

    def run(
        self,
        members: Sequence[int],
        mode: str,
        chained: bool,
        first_generation: int,
        calls: int,
    ) -> Stretch:
        """Make calls of members in random order, back to back, on a pool that is reset; collective.

        Args:
            members: by index.
            mode: "eager", or "graph", where only whole graphs are replayed.
            chained: whether nothing lies between calls; else each is paused and compared.
            first_generation: of the pool.
            calls: at least so many.

        Raises:
            PeerTimeout: a wait exceeded its bound.
        """
        fabric = self._fabric
        made: Counter[int] = Counter()
        self._wrong.zero_()
        self._first.fill_(-1)
        call = self._call_chained if chained else self._call_each
        with self._pauses():
            graphs = self._captured(tuple(members), chained) if mode == "graph" else []
            fabric.pool.reset(first_generation)
            begin = time.monotonic()
            while made.total() < calls:
                if graphs:
                    graph, ordered = self._random.choice(graphs)
                    graph.replay()
                    made += ordered
                else:
                    made += call(members, min(GRAPH_CALLS, calls - made.total()))
            fabric.synchronize()
            seconds = time.monotonic() - begin
        fabric.pool.check()
        fabric.pool.reset()
        count = len(self.members)
        return Stretch(
            seconds,
            [made[member] for member in range(count)],
            self._wrong[:count].tolist(),
            self._first[:count].tolist(),
        )

    def _call_each(self, members: Sequence[int], calls: int) -> Counter[int]:
        """Call members, with pauses and comparisons; returns how often each."""
        order = [self._random.choice(members) for _ in range(calls)]
        for member in order:
            self._callers[member].call()
        return Counter(order)

    def _call_chained(self, members: Sequence[int], calls: int) -> Counter[int]:
        """Call members one after another, and compare all at the end; returns how often each."""
        drawn = [
            (self._random.choice(members), self._random.randrange(SETS), index)
            for index in range(calls)
        ]
        order = [(self._callers[member], chosen, index) for member, chosen, index in drawn]
        for bank in {id(caller.bank): caller.bank for caller, _, _ in order}.values():
            bank.chained.fill_(float("nan"))
        for caller, chosen, index in order:
            caller.call_chained(chosen, index)
        for caller, chosen, index in order:
            caller.compare_chained(chosen, index)
        return Counter(member for member, _, _ in drawn)

    def _captured(self, members: tuple[int, ...], chained: bool) -> list[_Graph]:
        """Graphs of these members' calls in different orders."""
        graphs = self._graphs.get((members, chained))
        if graphs is None:
            call = self._call_chained if chained else self._call_each
            for member in members:  # libraries initialise before the first capture
                call([member], 1)
            self._fabric.barrier()
            graphs = self._graphs[members, chained] = [
                _capture(call, members) for _ in range(GRAPHS)
            ]
        return graphs


def _capture(call: Callable[[Sequence[int], int], Counter[int]], members: Sequence[int]) -> _Graph:
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        made = call(members, GRAPH_CALLS)
    return graph, made


def _variant(member: Member) -> Variant:
    return variants(member.op)[member.variant]


def _compile_ahead(hardware: Hardware, candidates: Sequence[Member]) -> None:
    """Let processes compile into the compiler's cache, where the ranks find it.

    They know neither promises nor pauses inside kernels.
    """
    of_problems: dict[Any, list[tuple[str, dict[str, Any]]]] = {}
    for member in candidates:
        if _variant(member).fused and not member.promised:
            of_problem = of_problems.setdefault(member.problem, [])
            of_problem.append((member.variant, member.config))
    with Screen(hardware) as screen:
        for problem, of_problem in of_problems.items():
            screen.begin(op_of(problem), problem, of_problem)
        for problem, of_problem in of_problems.items():
            screen.verdicts(op_of(problem), problem, of_problem)


def _tiny_problems(fabric: Fabric) -> Iterator[Any]:
    for op in operation_names():
        for problem in operation_shapes(op).tiny(fabric.world_size):
            if fabric.has_graphs and isinstance(problem, MatmulProblem):
                # The checker's K has too few steps to split.
                yield replace(problem, k=_TIMES_K * problem.k)
            else:
                yield problem


def _candidates(
    problems: Iterable[Any], fabric: Fabric, random: Random, configs: int, names: Sequence[str]
) -> Iterator[Member]:
    """Variants with kernels of ours on these problems, each with a few configs."""
    for problem in problems:
        op = op_of(problem)
        for name, variant in variants(op).items():
            if names and name not in names:
                continue
            if variant.unsupported_reason(problem, fabric.hardware) is not None:
                continue
            for config in _configs(variant, problem, fabric, random, configs):
                if record(op, name, problem, config, fabric.hardware):
                    for promised in (False, True) if _loads_early(name, config) else (False,):
                        yield Member(op, problem, name, config, promised)


def _loads_early(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a promise of :func:`taxfree.init` changes what a variant's plan does."""
    return name.endswith("_specialized") or bool(config.get("BY_WARP") and config["CHAINED"])


def _configs(
    variant: Variant, problem: Any, fabric: Fabric, random: Random, count: int
) -> list[dict[str, Any]]:
    """Seed configs, the default first, and others that the variant does not refuse."""
    hardware = fabric.hardware
    configs = variant.seed_configs(problem, hardware)[: -(-count // 2)]
    space = variant.space(problem, hardware)
    for _ in range(100):
        if len(configs) == count:
            break
        config = {name: random.choice(values) for name, values in space.items()}
        if config not in configs and variant.illegal_reason(problem, hardware, config) is None:
            configs.append(config)
    return configs


# -- tasks --------------------------------------------------------------------------------------

_soak: Soak | None = None


def make_ready(
    fabric: Fabric, /, **arguments: Any
) -> tuple[list[Member], list[tuple[Member, str]]]:
    """Plan and compile the members of a :class:`Soak`; returns them, and those left out and why."""
    global _soak
    _soak = Soak(fabric, **arguments)
    return _soak.members, _soak.left_out


def run(fabric: Fabric, /, **arguments: Any) -> Stretch:
    """Make calls: :meth:`Soak.run`."""
    assert _soak is not None, "make_ready comes first"
    return _soak.run(**arguments)


def us_per_load(fabric: Fabric) -> float:
    """The duration of one load of a pause, in microseconds."""
    word = torch.zeros(2, dtype=torch.int64, device=fabric.device)
    loads = 20_000 if fabric.has_graphs else 200
    for _ in range(2):  # the first time, it is compiled
        fabric.synchronize()
        begin = time.monotonic()
        Kernel(_load, 1)(word, loads)
        fabric.synchronize()
    return (time.monotonic() - begin) / loads * 1e6
