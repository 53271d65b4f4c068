"""The dispatcher at run time: one per process group.

A call looks up what it has in common with calls of other sizes in a dict, then its size in a list,
and runs the plan found there. Sizes without a plan must be planned first, which is collective:
ahead of time by :meth:`Runtime.prepare`, or at their first eager call, which all ranks make
together.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from taxfree._runtime.arguments import require_like, require_output, usage_errors
from taxfree._runtime.aside import aside
from taxfree._runtime.autotuning import Autotuned, Autotuning
from taxfree._runtime.dispatch import Choice, Dispatcher
from taxfree._runtime.lending import Keep
from taxfree._runtime.operations import Operations
from taxfree._runtime.order import OneThread, StreamOrder
from taxfree._runtime.plans import BASELINE, Bucket, Entry, Plans, rows_of
from taxfree._runtime.unrecorded import MetProblems, UnrecordedProblems
from taxfree.errors import NoRecord, UsageError
from taxfree.fingerprints import interpolated_fields
from taxfree.settings import Settings
from taxfree_kernels.all_gather_matmul.several import SeveralWeightsPlan, several_weights
from taxfree_kernels.all_gather_matmul.signature import joint_problem, several_layout
from taxfree_kernels.arguments import aligned
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.signature import Signature, signatures
from taxfree_kernels.variant import Problem, Ready, SizeRange, op_of
from taxfree_tuning_db import Record, Table

_MOST_LAYOUTS = 4096  # of arguments, that a runtime remembers
_COPIED_BYTES_PER_US = 2_000_000  # read and written; H100 and H200 copy faster
#: entries by size, the size, and the shape and dtype of the output, of a call
_Seen = tuple[list[Entry | None], int, tuple[int, ...], torch.dtype]
_UNSEEN: _Seen = ([], 0, (), torch.float16)
_UNKNOWN: tuple[None, list[Entry | None], int] = (None, [], 0)


@dataclass(frozen=True)
class Memory:
    """The memory that a runtime holds, in bytes.

    Args:
        heap_bytes: the symmetric heap: two slots for payloads, two for LL packets, three
            for Lamport words, and control words.
        slot_bytes: the largest payload that fused plans can exchange.
        workspace_bytes: scratch memory that all plans share, of the device and of libraries.
        plans: number of plans.
        kernels: number of compiled kernels that they launch.
    """

    heap_bytes: int
    slot_bytes: int
    workspace_bytes: int
    plans: int
    kernels: int


def most_saved(times: Sequence[tuple[float, float] | None], has_norm: bool) -> int:
    """Which way to compute a sum and what follows it saves the most time.

    It is the first, where one was not measured. What is left to others costs what it costs behind
    the library's sum. A norm behind a residual that was taken along is a kernel of its own then,
    for which half of the residual's time counts.

    Args:
        times: of the library and of ours, of those that take along most first.
        has_norm: whether the first takes a norm along.
    """
    measured = [each for each in times if each is not None]
    if len(measured) < len(times):
        return 0
    saved = [library - ours for library, ours in measured]
    if has_norm and len(measured) > 2:
        saved[1] -= (measured[1][0] - measured[2][0]) / 2
    saved[0] += 0.03 * measured[0][1]  # as much faster as a winner must be
    return saved.index(max(saved))


class Runtime(Operations, contextlib.AbstractContextManager["Runtime"]):
    """Runs operations on one group of ranks, dispatched by the tuning table.

    Created by :func:`taxfree.init`. All ranks of the group must make the same calls in the same
    order. Calls follow one another: one on another stream than the last waits for it, and two
    threads cannot call at once. The caller orders replays of captured graphs, with each other and
    with calls.

    As a context manager it closes itself. If the block raises, it gives back what this rank holds
    without waiting for the peers.

    A fork of the process must not use it: there each call raises :class:`taxfree.UsageError`, and
    :meth:`close` does nothing.

    All operations raise :class:`taxfree.UsageError` where the arguments do not fit together, and
    :class:`taxfree.PeerTimeout` where an earlier call lost a peer.
    """

    _is_autotuned = False  # whether a block of taxfree.autotune wants to know what is met

    def __init__(
        self,
        fabric: Fabric,
        dispatcher: Dispatcher,
        plan_on_first_call: bool = True,
        heap_bytes: int = 0,
        unrecorded: UnrecordedProblems | None = None,
        keep: Keep | None = None,
        database: Path | None = None,
        autotune_s: float = 0.0,
    ) -> None:
        self._fabric, self._dispatcher = fabric, dispatcher
        self._plan_on_first_call = plan_on_first_call
        self._heap_bytes, self._unrecorded = heap_bytes, unrecorded
        self._collecting: list[MetProblems] = [] if unrecorded is None else [unrecorded]
        self._met: MetProblems | None = None
        self._database = database
        self._autotuning = self._tuning_for(autotune_s) if autotune_s else None
        self._at_end: Autotuning | None = None  # of a block of taxfree.autotune
        if Runtime._is_autotuned:
            self._begin_block()
        self._plans = Plans(fabric, dispatcher, keep)
        self._several_weights = several_weights()
        several = dispatcher.limited_to(self._several_weights.keys() - {BASELINE})
        self._gather_plans = Plans(fabric, several)
        self._by_arguments: dict[Any, list[Entry | None]] = {}
        self._seen: dict[tuple[Any, ...], _Seen] = {}
        self._given: dict[int, tuple[Problem, list[Entry | None], int]] = {}  # problems, by id
        self._unprepared: Counter[Any] = Counter()
        self._numbers: dict[tuple[float, ...], torch.Tensor] = {}
        self._streams = StreamOrder(fabric.device)
        self._calling = OneThread()
        self._is_closed = False
        self._process = os.getpid()
        self.group_name: str = fabric.group.group_name
        self.world_size = fabric.world_size
        _runtimes[self.group_name] = _open[next(_numbers)] = self
        _groups.add(self.group_name)

    def __repr__(self) -> str:
        fabric, state = self._fabric, ", closed" if self._is_closed else ""
        return (
            f"<taxfree.Runtime of group {self.group_name!r}, rank {fabric.rank} of "
            f"{fabric.world_size}, fabric {fabric.name}{state}>"
        )

    @classmethod
    def on_fabric(
        cls, fabric: Fabric, records: Iterable[Record], settings: Settings | None = None
    ) -> Runtime:
        """A runtime on a fabric that is open already; every rank gives the same records."""
        return cls(fabric, Dispatcher(Table(user=records), fabric.hardware, settings))

    # -- calls -------------------------------------------------------------------------------

    def call(
        self, problem: Problem, tensors: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> torch.Tensor:
        """Run the operation of a given problem; its tensors are not checked against it."""
        _, entries, size = self._given.get(id(problem), _UNKNOWN)
        entry = entries[size] if size < len(entries) else None
        if entry is None:
            self._require_ours(problem)
            entry = self._plans.find(problem) or self._planned(problem, self._plans)
            if entry.choice.kind != "unprepared":
                planned = problem, self._plans.by_size(problem), rows_of(problem)
                _remember(self._given, id(problem), planned)
        if self._collecting:
            self._collect(entry, *_sizes_of(problem))
        return self._launch(entry, tensors, out)

    def _all_gather_matmuls(
        self,
        a_shard: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        returns_a: bool,
        is_optional: bool = False,
    ) -> list[torch.Tensor] | None:
        """all_gather(a_shard) @ weight (+ bias) for several weights, after one exchange.

        The record is that of one matmul with the columns of all weights. Only variants that can
        run several weights are considered.

        Args:
            a_shard: [m / world_size, k], the same size on every rank.
            weights: [k, n] each.
            biases: [n] or None for each.
            returns_a: whether A is wanted, too.
            is_optional: not by variants that give way to PyTorch's own op.

        Returns:
            [m, n] for each weight, then A [m, k] if it is wanted; None if nothing ran.
        """
        if a_shard.shape[0] == 0:
            columns = [weight.shape[1] for weight in weights] + [a_shard.shape[1]] * returns_a
            return [self._of_nothing(a_shard, None, (0, n), a_shard.dtype) for n in columns]
        layout = several_layout(a_shard, weights, biases)
        entries, m, *_ = self._seen.get(layout, _UNSEEN)
        entry = entries[m] if m < len(entries) else None
        if entry is None:
            with usage_errors():
                problem = joint_problem(self._fabric, a_shard, weights, biases)
            m = problem.m
            entry = self._gather_plans.find(problem) or self._planned(problem, self._gather_plans)
            if entry.choice.kind != "unprepared":
                seen = self._gather_plans.by_size(problem), m, (), a_shard.dtype
                _remember(self._seen, layout, seen)
        with self._calling:
            entry.calls += 1
            self._collect(entry, m)
            ready = self._plan_of(entry)
            choice = entry.choice if ready is entry.plan else entry.choice.of("eager")
            if is_optional and self._several_weights[choice.variant].gives_way:
                return None
            plan = ready.plan
            assert isinstance(plan, SeveralWeightsPlan)
            return plan.run_several(aligned(a_shard), weights, biases, returns_a)

    def _call(
        self, signature: Signature, arguments: tuple[Any, ...], out: torch.Tensor | None
    ) -> torch.Tensor:
        is_seen = (
            is_compiling()
            or _len_torch_dispatch_stack()
            or type(arguments[0]) is FakeTensor
            or (torch.is_grad_enabled() and requires_grad(*arguments))
        )
        if not is_seen:
            return self._run(signature, arguments, out)
        result: torch.Tensor = getattr(torch.ops.taxfree, signature.name)(
            *arguments, self.group_name
        )
        if out is None:
            return result
        require_like(out, tuple(result.shape), result, result.dtype)
        return out.copy_(result)

    def _run(
        self, signature: Signature, arguments: tuple[Any, ...], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run an operation; its method and its torch op come here."""
        try:
            layout = signature.layout(*arguments)
        except AttributeError:
            with usage_errors():
                signature.normalized(arguments)
            raise
        entries, rows, shape, dtype = self._seen.get(layout, _UNSEEN)
        entry = entries[rows] if rows < len(entries) else None
        if entry is None:
            with usage_errors():
                arguments = signature.normalized(arguments)
            named = signature.named(arguments)
            rows, *_ = signature.sizes(self.world_size, **named)
            shape = signature.shape(self.world_size, rows, **named)
            dtype = signature.dtype(arguments)
            if rows == 0 and signature.fits(self._fabric, 0, **named):
                return self._of_nothing(arguments[0], out, shape, dtype)
            entry = self._entry(signature, rows, shape, arguments)
        if self._collecting:
            self._collect(entry, *signature.sizes(self.world_size, **signature.named(arguments)))
        inputs = signature.inputs(self._on_device, *arguments)
        if out is None:
            out = arguments[0].new_empty(shape, dtype=dtype)
        else:
            reusable = None if signature.reusable is None else inputs[signature.reusable]
            require_output(out, shape, arguments[0], dtype, inputs, reusable)
        return self._launch(entry, inputs, out)

    def _of_nothing(
        self,
        like: torch.Tensor,
        out: torch.Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The result of a call without rows, for which no rank needs another."""
        self._require_open()
        if out is None:
            return like.new_empty(shape, dtype=dtype)
        require_like(out, shape, like, dtype)
        return out

    def _launch(
        self, entry: Entry, inputs: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> torch.Tensor:
        self._calling.enter()
        try:
            entry.calls += 1
            return self._plan_of(entry).run(*inputs, out)
        except RuntimeError as error:
            lost = self._fabric.loss(error)
            if lost is None:
                raise
            raise lost from error
        finally:
            self._calling.leave()

    def _collect(self, entry: Entry, *sizes: int) -> None:
        """Note a call of these sizes, if it is not tuned."""
        if not entry.is_tuned:
            for met in self._collecting:
                met.add(entry.bucket.problem, *sizes)

    def _on_device(self, *numbers: float) -> torch.Tensor:
        """float32 [len(numbers)], made once; under capture it is part of the graph."""
        tensor = self._numbers.get(numbers)
        if tensor is None:
            if self._is_capturing():
                return self._filled(numbers)
            tensor = aside(self._fabric.device, partial(self._filled, numbers))
            _remember(self._numbers, numbers, tensor)
        return tensor

    def _filled(self, numbers: tuple[float, ...]) -> torch.Tensor:
        tensor = torch.empty(len(numbers), dtype=torch.float32, device=self._fabric.device)
        for index, number in enumerate(numbers):  # a kernel each: copies from the host would wait
            tensor[index].fill_(number)
        return tensor

    def _plan_of(self, entry: Entry) -> Ready:
        """The plan that a call of this moment runs, on this stream."""
        return entry.plan if self._follow() or entry.eager is None else entry.eager

    def _follow(self) -> bool:
        """Let what this stream is given now follow the last call; whether it is captured."""
        fabric = self._fabric
        fabric.pool.check()
        if not fabric.has_graphs:
            return False
        is_captured = self._streams.follow()
        if is_captured:
            fabric.keep_memory()
        return is_captured

    @contextlib.contextmanager
    def _launching(self) -> Iterator[None]:
        """Kernels that are launched on the fabric within are a call of this runtime."""
        self._require_open()
        with self._calling:
            self._follow()
            yield

    def _is_capturing(self) -> bool:
        return self._fabric.has_graphs and torch.cuda.is_current_stream_capturing()

    # -- planning ----------------------------------------------------------------------------

    def prepare(self, problems: Iterable[Problem | SizeRange]) -> None:
        """Plan and compile problems ahead of time; collective.

        Args:
            problems: such as :class:`taxfree.AllGatherMatmul`; for all rows from 1 to 8192 of one,
                ``problem.for_rows(1, 8192)``.

        Raises:
            UsageError: one of them is not a problem, or is for another world size.
            TaxfreeError: a rank cannot even run the library's path.
            PeerTimeout: not all ranks call this.
        """
        if not isinstance(problems, Iterable):
            raise UsageError(f"{problems!r} is no list of problems", "prepare([problem])")
        self._require_open()
        ranges, wanted = list[SizeRange](), dict[Problem, Bucket]()
        for problem in problems:
            self._require_ours(problem.problem if isinstance(problem, SizeRange) else problem)
            ranges.append(problem if isinstance(problem, SizeRange) else SizeRange(problem))
        with self._calling:
            self._tune_first(ranges)
            for sizes in ranges:
                wanted |= self._plans.buckets(sizes)
            self._plans.prepare(wanted)
        if self._met is not None:
            for problem in self._plans.untuned(ranges):
                self._met.add(problem, *_sizes_of(problem), calls=0)

    def _entry(
        self, signature: Signature, rows: int, shape: tuple[int, ...], arguments: tuple[Any, ...]
    ) -> Entry:
        """The entry of a call that is like none lately; later ones like it are found at once."""
        key, named = signature.key(arguments), signature.named(arguments)
        entries = self._by_arguments.get(key, [])
        entry = entries[rows] if 0 <= rows < len(entries) else None
        if entry is None or not signature.fits(self._fabric, rows, **named):
            with usage_errors():
                problem = signature.problem(self._fabric, **named)
            entry = self._plans.find(problem) or self._planned(problem, self._plans)
            if entry.choice.kind == "unprepared":
                return entry
            entries = self._plans.by_size(problem)
            _remember(self._by_arguments, key, entries)
        seen = entries, rows, shape, signature.dtype(arguments)
        _remember(self._seen, signature.layout(*arguments), seen)
        return entry

    def _planned(self, problem: Problem, plans: Plans) -> Entry:
        """The entry of a problem that a call is the first to have."""
        self._require_open()
        if self._is_capturing():
            return self._unprepared_entry(problem, plans, "first called under graph capture")
        if not self._plan_on_first_call:
            return self._unprepared_entry(problem, plans, "not prepared")
        with self._calling:
            self._tune_first([SizeRange(problem)])
            plans.prepare({problem: plans.bucket(problem)}, called=problem)
        entry = plans.find(problem)
        assert entry is not None
        return entry

    def _begin_block(self) -> None:
        """Count what a block of taxfree.autotune meets, and compile for it meanwhile."""
        if self._dispatcher.is_disabled:
            return
        self._at_end = self._tuning_for(0.0)
        self._at_end.begin()
        self._collect_met(self._at_end.expect)

    def _end_block(self) -> None:
        if self._at_end is not None:
            self._at_end.close()
            self._at_end = None

    def _collect_met(self, on_new: Callable[[Problem], None] = lambda problem: None) -> None:
        """Count calls of problems without a record of their own, from now on."""
        self._met = MetProblems(on_new)
        self._collecting.append(self._met)

    def _take_met(self) -> list[Problem]:
        """The problems that were met since, the most frequent first; they count no longer."""
        met, self._met = self._met, None
        if met is None:
            return []
        self._collecting.remove(met)
        return met.most_frequent_first()

    def _tune_now(self, problems: Sequence[Problem], seconds: float) -> list[Autotuned]:
        """Tune what a block has met on these ranks; collective."""
        if self._at_end is None:
            return []
        self._at_end.seconds = seconds
        with self._calling:
            return self._tune(self._at_end, problems)

    def _tuning_for(self, seconds: float) -> Autotuning:
        return Autotuning(self._fabric, self._heap_bytes, self._database, seconds)

    def _tune_first(self, ranges: Sequence[SizeRange]) -> None:
        """Tune problems before they are planned, as ``TAXFREE_AUTOTUNE`` says; collective."""
        tuning = self._autotuning
        if tuning is not None:
            self._tune(tuning, list(self._plans.untuned(ranges)))
            if tuning.is_over:
                tuning.close()
                self._autotuning = None

    def _tune(self, tuning: Autotuning, problems: Sequence[Problem]) -> list[Autotuned]:
        """Tune problems on these ranks, and plan what is planned by the new records; collective."""
        outcomes = tuning.tune(problems)
        records = [outcome.record for outcome in outcomes if outcome.record is not None]
        if records:
            for plans in (self._plans, self._gather_plans):
                plans.renew(records)
            for held in (self._by_arguments, self._seen, self._given):
                held.clear()
        return outcomes

    def _unprepared_entry(self, problem: Problem, plans: Plans, why: str) -> Entry:
        largest = plans.bucket(problem).problem  # one warning for what one plan would serve
        if not self._unprepared[largest]:
            warnings.warn(
                f"{problem} runs the library: {why}; call prepare() before",
                RuntimeWarning,
                stacklevel=6,  # of whoever calls an operation
            )
        self._unprepared[largest] += 1
        return plans.unprepared(problem, why)

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError("the runtime is closed", "call taxfree.init() again")
        if self._process != os.getpid():
            raise UsageError(
                f"the runtime belongs to process {self._process}, of which this one is a fork",
                "start processes with the spawn method, and call taxfree.init() in each",
            )

    def _require_ours(self, problem: Problem) -> None:
        if not isinstance(problem, Problem):
            raise UsageError(
                f"{problem!r} is no problem", "for example taxfree.AllGatherMatmul(...)"
            )
        if problem.world_size != self.world_size:
            raise UsageError(
                f"{problem} is for {problem.world_size} ranks, this group has {self.world_size}",
                f"give the problem world_size={self.world_size}",
            )

    # -- what it knows -----------------------------------------------------------------------

    def choice(self, problem: Problem) -> Choice:
        """The variant that runs, or would run, for a problem, and why."""
        self._require_ours(problem)
        return self._plans.choice(problem)

    def _runs_library(self, name: str, *arguments: Any, moved_bytes: int = 0) -> bool:
        """Whether a torch op runs the library on such arguments.

        If so, the problem counts as met; else the calls of the op will count.

        Args:
            name: of the op.
            arguments: of the op, without the group; tensors need no memory.
            moved_bytes: that are read and written in addition where the op takes the place of the
                library's: it must save more than they take.
        """
        problem, plans = self._looked_up(name, arguments)
        if plans.choice(problem).variant != BASELINE:
            times = list(plans.measured_us(problem).values()) if moved_bytes else []
            saved_us = min(us for us, _ in times) - max(us for _, us in times) if times else 0.0
            if not moved_bytes or saved_us > moved_bytes / _COPIED_BYTES_PER_US:
                return False
        if self._collecting and not plans.is_tuned(problem):
            for met in self._collecting:
                met.add(plans.bucket(problem).problem, *_sizes_of(problem))
        return True

    def _measured_us(self, name: str, *arguments: Any) -> tuple[float, float] | None:
        """Times of the library and of what runs a torch op, in a graph if there are; or None."""
        problem, plans = self._looked_up(name, arguments)
        times = plans.measured_us(problem)
        return times.get("graph", times.get("eager"))

    def _looked_up(self, name: str, arguments: Any) -> tuple[Problem, Plans]:
        """The problem of a torch op's arguments, and the plans that serve it."""
        with usage_errors():
            if name == "all_gather_matmuls":
                return joint_problem(self._fabric, *arguments[:3]), self._gather_plans
            signature = signatures()[name]
            named = signature.named(signature.normalized(arguments))
            return signature.problem(self._fabric, **named), self._plans

    def _gives_way(self, signature: Signature, *arguments: Any) -> bool:
        """Whether a call would run the baseline where the caller has PyTorch's own fused op.

        If so, the problem counts as met. The first call plans, as the operation does.
        """
        problem, _ = self._looked_up(signature.name, arguments)
        entry = self._plans.find(problem) or self._planned(problem, self._plans)
        if entry.choice.of("graph" if self._is_capturing() else "eager").variant != BASELINE:
            return False
        self._collect(entry, *_sizes_of(problem))
        return True

    def explain(self, problem: Problem) -> str:
        """The choice for a problem, the reason, and the steps of the look-up, as text."""
        try:
            choice = self.choice(problem)
        except NoRecord as error:
            lines = [f"nothing: {error.message}"]
        else:
            lines = [f"{choice.variant} {choice.config or ''}".rstrip() + f" ({choice.source})"]
            lines.append(f"because: {choice.why}")
            if choice.in_eager_calls:
                lines.append(choice.in_eager_calls)
        for step in self._dispatcher.answer(op_of(problem), problem).lookup_trace:
            lines.append(f"{'+' if step.found else '-'} {step.looked_for}: {step.why}")
        return "\n".join(lines)

    def stats(self) -> dict[str, dict[str, int]]:
        """Calls by problem (as text, with its sizes) and kind of choice, such as "exact"."""
        counters: dict[str, Counter[str]] = {}
        for entry in self._entries():
            if entry.calls:
                counters.setdefault(str(entry), Counter())[entry.choice.source] += entry.calls
        for problem, calls in self._unprepared.items():
            counters.setdefault(str(problem), Counter())["unprepared"] += calls
        return {problem: dict(kinds) for problem, kinds in counters.items()}

    def kernels(self) -> dict[str, int]:
        """How many compiled kernels the planned sizes launch, by operation."""
        return dict(Counter(self._plans.kernels()) + Counter(self._gather_plans.kernels()))

    def _entries(self) -> Iterator[Entry]:
        return itertools.chain(self._plans, self._gather_plans)

    def memory(self) -> Memory:
        """The memory that this runtime holds, while it is open."""
        self._require_open()
        return Memory(
            heap_bytes=self._heap_bytes,
            slot_bytes=self._fabric.pool.slot_bytes,
            workspace_bytes=self._fabric.workspace_bytes,
            plans=len({id(plan) for entry in self._entries() for plan in entry.plans}),
            kernels=sum(self.kernels().values()),
        )

    def check(self) -> None:
        """Synchronize this rank's device, then check whether a peer was lost.

        Raises:
            PeerTimeout: a wait exceeded its bound, and the results since are NaN; or a peer's wait
                for this rank, which came late, did, and this rank's results may be wrong.
        """
        self._require_open()
        self._fabric.synchronize()
        self._fabric.pool.check_at_rest()

    def reset(self) -> None:
        """Make the runtime usable after a lost peer; collective, all ranks alive."""
        self._require_open()
        self._fabric.pool.reset()

    @property
    def _is_calling(self) -> bool:
        """Whether a call of this thread runs: what that calls is the library's."""
        return self._calling.is_within

    @property
    def collects_problems(self) -> bool:
        """Whether ``TAXFREE_LOG`` is set: rank 0 collects problems without their own records."""
        return self._dispatcher.settings.log is not None

    @property
    def tunes_problems(self) -> bool:
        """Whether ``TAXFREE_AUTOTUNE`` is set: what has no record is tuned when it is planned."""
        return self._dispatcher.settings.autotune_s is not None

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or its block raised."""
        return self._is_closed

    def close(self) -> None:
        """Free the arena, the plans and the process group; collective.

        Every rank waits until all have called it, then frees what it holds. Later calls raise
        :class:`taxfree.UsageError`; closing again does nothing. If the process group has been
        destroyed, no rank waits for another. Graphs that were captured hold addresses of the arena:
        do not replay them any more.

        Raises:
            RuntimeError: a peer is lost; what this rank held is freed nevertheless.
        """
        if self._retire():
            self._fabric.close()

    def _release(self) -> None:
        """Free what this rank holds, without its peers."""
        if self._retire():
            with contextlib.suppress(RuntimeError):  # of a device whose error was raised before
                self._fabric.release()

    def _retire(self) -> bool:
        """Forget all plans; whether this process has a fabric to free."""
        if self._is_closed or self._process != os.getpid():
            return False
        self._is_closed = True
        _runtimes.pop(self.group_name, None)
        for number, other in list(_open.items()):
            if other is self:
                del _open[number]
            elif other.group_name == self.group_name:  # the one that was opened last
                _runtimes[self.group_name] = other
        for held in (
            self._plans, self._gather_plans, self._by_arguments, self._seen, self._given,
            self._numbers,
        ):  # fmt: skip
            held.clear()
        for worker in (self._unrecorded, self._autotuning, self._at_end):
            if worker is not None:
                worker.close()
        return True

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release()  # the peers may never come


def _remember(held: dict[Any, Any], key: Any, value: Any) -> None:
    """Add to a dict, which is emptied when it has become large."""
    if len(held) >= _MOST_LAYOUTS:
        held.clear()
    held[key] = value


def _sizes_of(problem: Problem) -> tuple[int, ...]:
    return tuple(getattr(problem, name) for name in interpolated_fields(op_of(problem)))


def requires_grad(*arguments: Any) -> bool:
    """Whether autograd must see an operation with these arguments."""
    if torch.is_grad_enabled():
        for argument in arguments:  # a generator takes twice as long
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                return True
    return False


def runtimes() -> list[Runtime]:
    """The open runtimes of this process, one for each group, in the order of the groups."""
    return list(_runtimes.values())


_runtimes: weakref.WeakValueDictionary[str, Runtime] = weakref.WeakValueDictionary()
#: more than the above, by the order of their opening: two may share a group
_open: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_groups: set[str] = set()  # names of those that have or had a runtime
_plans_of_parent: list[Any] = []


@atexit.register
def _release_all() -> None:
    """Free what was never closed, while the interpreter still serves the groups' threads."""
    for runtime in list(_open.values()):
        runtime._release()


def _after_fork() -> None:
    """Forget the parent's plans, so that each call asks whose runtime it is.

    They are kept: to free memory of a device is not this process's business.
    """
    for runtime in list(_open.values()):
        _plans_of_parent.append((runtime._plans, runtime._gather_plans, runtime._by_arguments))
        runtime._plans = Plans(runtime._fabric, runtime._dispatcher)
        runtime._gather_plans = Plans(runtime._fabric, runtime._dispatcher)
        runtime._by_arguments, runtime._seen, runtime._given = {}, {}, {}
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)


def runtime_of(group_name: str) -> Runtime:
    """The runtime of a process group, by the group's name.

    Raises:
        UsageError: there is none.
    """
    runtime = _runtimes.get(group_name)
    if runtime is None:
        raise UsageError(f"no taxfree runtime on group {group_name!r}", "call taxfree.init() first")
    return runtime


def running(group_name: str) -> Runtime | None:
    """The runtime of a process group; None if it is closed.

    Raises:
        UsageError: there never was one.
    """
    runtime = _runtimes.get(group_name)
    return runtime if runtime is not None or group_name in _groups else runtime_of(group_name)


def table_digest(group_name: str) -> str:
    """A digest of the table by which a process group's runtime chooses; empty if there is none."""
    runtime = _runtimes.get(group_name)
    return "" if runtime is None else runtime._dispatcher.digest
