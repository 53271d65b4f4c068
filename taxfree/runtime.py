"""The dispatcher at run time: one per process group and stream.

A call looks up its arguments in a dict and runs the plan found there. A problem without a plan must
be planned first, which is collective: ahead of time by :meth:`Runtime.prepare`, or at its first
eager call, which all ranks make together.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from taxfree import problems
from taxfree.dispatch import Choice, Dispatcher, Kind
from taxfree.errors import UsageError, one_line
from taxfree.settings import Settings
from taxfree_kernels.errors import PeerTimeout
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import compiling
from taxfree_kernels.variant import Plan, op_of, operation, variants
from taxfree_tuning_db import Record, Table


@dataclass
class _Entry:
    """The plan a problem runs; `eager`, if given, replaces it outside graph capture."""

    plan: Plan
    choice: Choice
    problem: Any
    eager: Plan | None = None
    calls: int = 0


@dataclass(frozen=True)
class Memory:
    """The memory that a runtime holds, in bytes.

    Args:
        heap_bytes: the symmetric heap: two slots for payloads, two for flag-in-data words, three
            for bare words, and control words.
        slot_bytes: the largest payload that fused plans can exchange.
        workspace_bytes: memory that plans hold besides the heap; counted on GPUs only.
        plans: number of plans.
    """

    heap_bytes: int
    slot_bytes: int
    workspace_bytes: int
    plans: int


class Runtime:
    """Runs operations on one group of ranks, dispatched by the tuning table.

    Created by :func:`taxfree.init`. Use it on one stream at a time. All ranks of the group must
    make the same calls in the same order.

    As a context manager it closes itself. If the block raises, it gives back what this rank holds
    without waiting for the peers.

    A fork of the process must not use it: there each call raises :class:`taxfree.UsageError`, and
    :meth:`close` does nothing.
    """

    def __init__(
        self,
        fabric: Fabric,
        dispatcher: Dispatcher,
        plan_on_first_call: bool = True,
        heap_bytes: int = 0,
    ) -> None:
        self._fabric, self._dispatcher = fabric, dispatcher
        self._plan_on_first_call = plan_on_first_call
        self._heap_bytes = heap_bytes
        self._workspace_bytes = 0
        self._entries: dict[Any, _Entry] = {}  # by problem
        self._by_arguments: dict[Any, _Entry] = {}
        self._unprepared: Counter[Any] = Counter()
        self._numbers: dict[tuple[float, ...], torch.Tensor] = {}
        self._is_closed = False
        self._process = os.getpid()
        self.group_name: str = fabric.group.group_name
        self.world_size = fabric.world_size
        _runtimes[self.group_name] = self
        _open.add(self)

    @classmethod
    def on_fabric(
        cls, fabric: Fabric, records: Iterable[Record], settings: Settings | None = None
    ) -> Runtime:
        """A runtime on a fabric that is open already; every rank gives the same records."""
        return cls(fabric, Dispatcher(Table(user=records), fabric.hardware, settings))

    # -- calls -------------------------------------------------------------------------------

    def all_gather_matmul(
        self,
        a_shard: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gather_dim: int = 0,
        m: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """all_gather(a_shard) @ weight (+ bias), with this rank's own weight.

        Args:
            a_shard: contiguous, float16 or bfloat16; for gather_dim 0 [ceil(m / world_size), k],
                where the last ranks have fewer rows or none if m does not divide evenly; for
                gather_dim 1 [m, k / world_size].
            weight: [k, n] of the same dtype; one of its strides must be 1.
            bias: [n], or None.
            gather_dim: 0: shards are rows; 1: shards are columns.
            m: rows over all ranks; required when gather_dim is 0 and their number is not
                ``world_size * a_shard.shape[0]`` on every rank.
            out: [m, n], contiguous; the result is written into it.

        Returns:
            [m, n] of the inputs' dtype.

        Raises:
            UsageError: the tensors do not fit together.
            PeerTimeout: an earlier call lost a peer.
        """
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.taxfree.all_gather_matmul(
                a_shard, weight, bias, gather_dim, m, self.group_name
            )
            return result if out is None else out.copy_(result)
        arguments = (
            "all_gather_matmul", a_shard.shape, a_shard.dtype, a_shard.device, _layout(weight),
            _layout(bias), _layout(out), gather_dim, m,
        )  # fmt: skip
        entry = self._by_arguments.get(arguments)
        if entry is None:
            problem = problems.all_gather_matmul(self._fabric, a_shard, weight, bias, gather_dim, m)
            problems.require_output(self._fabric, out, (problem.m, problem.n), problem.dtype)
            entry = self._entry_of(arguments, problem)
        if out is None:
            out = a_shard.new_empty(entry.problem.m, entry.problem.n)
        return self._run(entry, (_from_16_bytes(a_shard), weight, bias), out)

    def flash_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_lens: torch.Tensor,
        block_table: torch.Tensor | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one query token per sequence over a KV cache that is split across ranks.

        The keys of a sequence are those of rank 0, then those of rank 1, and so on; the query
        comes after all of them. Lengths may change between replays of a graph.

        Args:
            q: [batch, q_heads, head_dim], the same on every rank; float16 or bfloat16.
            k, v: this rank's cache, [batch, capacity, kv_heads, head_dim] and [..., v_head_dim];
                with a block table [pages, page_size, kv_heads, ...]. Each head is contiguous.
            kv_lens: int32 [world_size, batch], the same on every rank: how many keys of each
                sequence each rank holds. The output of a sequence without keys is zero.
            block_table: int32 [batch, pages], contiguous: this rank's pages of each sequence.
            scale: factor of the logits; ``head_dim**-0.5`` when None. A captured call with another
                scale, or a soft cap, that no eager call has used before runs two more small
                kernels.
            soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
            window: the number of most recent keys that a query attends to; None for all.
            out: [batch, q_heads, v_head_dim], contiguous; the result is written into it.

        Returns:
            [batch, q_heads, v_head_dim] of q's dtype, bitwise identical on every rank.

        Raises:
            UsageError: the tensors do not fit together.
            PeerTimeout: an earlier call lost a peer.
        """
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.taxfree.flash_decode(
                q, k, v, kv_lens, block_table, scale, soft_cap, window, self.group_name
            )
            return result if out is None else out.copy_(result)
        arguments = (
            "flash_decode", q.shape, q.dtype, q.device, _layout(k), _layout(v), _layout(kv_lens),
            _layout(block_table), _layout(out), scale, soft_cap, window,
        )  # fmt: skip
        entry = self._by_arguments.get(arguments)
        if entry is None:
            problem = problems.flash_decode(
                self._fabric, q, k, v, kv_lens, block_table, scale, soft_cap, window
            )
            problems.require_output(self._fabric, out, (*q.shape[:2], v.shape[3]), problem.dtype)
            entry = self._entry_of(arguments, problem)
        if out is None:
            out = q.new_empty(*q.shape[:2], v.shape[3])
        scaling = None
        if scale is not None or soft_cap is not None:
            scaling = self._on_device(scale or q.shape[2] ** -0.5, soft_cap or 0.0)
        return self._run(entry, (_from_16_bytes(q), k, v, kv_lens, block_table, scaling), out)

    def _on_device(self, *numbers: float) -> torch.Tensor:
        """float32 [len(numbers)], made once; under capture it is part of the graph."""
        found = self._numbers.get(numbers)
        if found is None:
            found = torch.empty(len(numbers), dtype=torch.float32, device=self._fabric.device)
            for at, number in enumerate(numbers):  # a kernel each: copies from the host would wait
                found[at].fill_(number)
            if not self._is_capturing():
                self._numbers[numbers] = found
        return found

    def matmul_all_reduce(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum over all ranks of x @ weight (+ bias) (+ residual); bitwise equal on all ranks.

        Args:
            x: [m, k], this rank's columns; float16 or bfloat16.
            weight: [k, n] of the same dtype, this rank's rows; one of its strides 1.
            bias: [n], or None; the same on all ranks, and added once.
            residual: [m, n], or None; the same on all ranks, and added once.
            out: [m, n], contiguous; the result is written into it. It must not be the residual.

        Returns:
            [m, n] of the inputs' dtype.

        Raises:
            UsageError: the tensors do not fit together.
            PeerTimeout: an earlier call lost a peer.
        """
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.taxfree.matmul_all_reduce(
                x, weight, bias, residual, self.group_name
            )
            return result if out is None else out.copy_(result)
        arguments = (
            "matmul_all_reduce", x.shape, x.dtype, x.device, _layout(weight), _layout(bias),
            _kind(residual), _layout(out),
        )  # fmt: skip
        entry = self._by_arguments.get(arguments)
        if entry is None:
            problem = problems.matmul_all_reduce(self._fabric, x, weight, bias, residual)
            problems.require_output(self._fabric, out, (problem.m, problem.n), problem.dtype)
            entry = self._entry_of(arguments, problem)
        if out is None:
            out = x.new_empty(entry.problem.m, entry.problem.n)
        if residual is not None:
            residual = _from_16_bytes(residual)
        return self._run(entry, (_from_16_bytes(x), weight, bias, residual, None, None), out)

    def matmul_all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm_weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`matmul_all_reduce`, followed by an RMSNorm of each row; returns both.

        The norm is sum * rsqrt(mean(sum^2) + eps) * norm_weight, computed in float32 from the sum
        before rounding or, in some variants, after it.

        Args:
            x: [m, k], this rank's columns; float16 or bfloat16.
            weight: [k, n] of the same dtype, this rank's rows; one of its strides 1.
            norm_weight: [n], the same on all ranks.
            bias: [n], or None; the same on all ranks, and added once.
            residual: [m, n], or None; the same on all ranks, and added once.
            eps: the same on all ranks. A captured call with a value that no eager call has used
                before runs one more small kernel.
            out: [2, m, n], contiguous; both are written into it. It must not be the residual.

        Returns:
            The normalised sum, and the sum, which is the next layer's residual: [m, n] each, of the
            inputs' dtype.

        Raises:
            UsageError: the tensors do not fit together, or eps is not a positive float32.
            PeerTimeout: an earlier call lost a peer.
        """
        if torch.compiler.is_compiling():
            both: torch.Tensor = torch.ops.taxfree.matmul_all_reduce_rms_norm(
                x, weight, norm_weight, bias, residual, eps, self.group_name
            )
            both = both if out is None else out.copy_(both)
            return both[0], both[1]
        arguments = (
            "matmul_all_reduce_rms_norm", x.shape, x.dtype, x.device, _layout(weight),
            _layout(norm_weight), _layout(bias), _kind(residual), _layout(out), eps,
        )  # fmt: skip
        entry = self._by_arguments.get(arguments)
        if entry is None:
            problem = problems.matmul_all_reduce_rms_norm(
                self._fabric, x, weight, norm_weight, bias, residual, eps
            )
            problems.require_output(self._fabric, out, (2, problem.m, problem.n), problem.dtype)
            entry = self._entry_of(arguments, problem)
        if out is None:
            out = x.new_empty(2, entry.problem.m, entry.problem.n)
        if residual is not None:
            residual = _from_16_bytes(residual)
        tensors = (_from_16_bytes(x), weight, bias, residual, norm_weight, self._on_device(eps))
        self._run(entry, tensors, out)
        return out[0], out[1]

    def matmul_reduce_scatter(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scatter_dim: int = 0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """This rank's shard of the sum over all ranks of x @ weight.

        Args:
            x: [m, k], this rank's columns; float16 or bfloat16.
            weight: [k, n] of the same dtype, this rank's rows; one of its strides 1.
            scatter_dim: 0: shards are rows; 1: shards are columns, and n must be divisible by
                world_size.
            out: of the result's shape, contiguous; the result is written into it.

        Returns:
            [ceil(m / world_size), n] for scatter_dim 0, where rows beyond m are zero; [m, n /
            world_size] for scatter_dim 1; of the inputs' dtype.

        Raises:
            UsageError: the tensors do not fit together.
            PeerTimeout: an earlier call lost a peer.
        """
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.taxfree.matmul_reduce_scatter(
                x, weight, scatter_dim, self.group_name
            )
            return result if out is None else out.copy_(result)
        arguments = (
            "matmul_reduce_scatter", x.shape, x.dtype, x.device, _layout(weight), _layout(out),
            scatter_dim,
        )  # fmt: skip
        entry = self._by_arguments.get(arguments)
        if entry is None:
            problem = problems.matmul_reduce_scatter(self._fabric, x, weight, scatter_dim)
            shape = (problem.shard_rows, problem.shard_columns)
            problems.require_output(self._fabric, out, shape, problem.dtype)
            entry = self._entry_of(arguments, problem)
        if out is None:
            out = x.new_empty(entry.problem.shard_rows, entry.problem.shard_columns)
        return self._run(entry, (_from_16_bytes(x), weight), out)

    def call(
        self, problem: Any, tensors: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> torch.Tensor:
        """Run the operation of a given problem; its tensors are not checked against it."""
        return self._run(self._entries.get(problem) or self._entry(problem), tensors, out)

    def _run(
        self, entry: _Entry, tensors: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> torch.Tensor:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            raise UsageError("an input requires a gradient", "call under torch.no_grad()")
        entry.calls += 1
        self._fabric.pool.check()
        plan = entry.plan if entry.eager is None or self._is_capturing() else entry.eager
        return plan(*tensors, out)

    def _is_capturing(self) -> bool:
        return self._fabric.has_graphs and torch.cuda.is_current_stream_capturing()

    # -- planning ----------------------------------------------------------------------------

    def prepare(self, problems: Iterable[Any]) -> None:
        """Plan and compile problems ahead of time; collective.

        Args:
            problems: such as :class:`taxfree.AllGatherMatmul`.

        Raises:
            UsageError: one of them is not a problem, or is for another world size.
            PeerTimeout: not all ranks call this.
        """
        if not isinstance(problems, Iterable):
            raise UsageError(f"{problems!r} is no list of problems", "prepare([problem])")
        self._require_open()
        for problem in problems:
            self._require_ours(problem)
            if problem not in self._entries:
                self._entries[problem] = self._plan(problem, self.choice(problem))
        self._fabric.barrier()

    def _entry_of(self, arguments: tuple[Any, ...], problem: Any) -> _Entry:
        """The entry of a problem, found by these arguments from now on."""
        entry = self._entry(problem)
        if entry.choice.kind != "unprepared":
            self._by_arguments[arguments] = entry
        return entry

    def _entry(self, problem: Any) -> _Entry:
        entry = self._entries.get(problem)
        if entry is not None:
            return entry
        self._require_open()
        if self._is_capturing():
            return self._unprepared_entry(problem, "first met under graph capture")
        if not self._plan_on_first_call:
            return self._unprepared_entry(problem, "not prepared")
        entry = self._plan(problem, self.choice(problem))
        self._fabric.barrier()  # nobody calls before all have compiled
        self._entries[problem] = entry
        return entry

    def _unprepared_entry(self, problem: Any, why: str) -> _Entry:
        if not self._unprepared[problem]:
            warnings.warn(
                f"{problem} runs the baseline: {why}; call prepare() before",
                RuntimeWarning,
                stacklevel=5,  # of whoever calls an operation
            )
        self._unprepared[problem] += 1
        choice = Choice("unprepared", "baseline", why=why)
        plan = variants(op_of(problem))["baseline"].plan(problem, self._fabric, {})
        return _Entry(plan, choice, problem)

    def _plan(self, problem: Any, choice: Choice) -> _Entry:
        choice = self._agreed(problem, choice)
        before = self._allocated()
        plan, ran = self._planned(problem, choice)
        eager = None
        if ran is choice and choice.eager is not None:
            eager, ran_eager = self._planned(problem, choice.eager)
            ran = dataclasses.replace(ran, eager=ran_eager)
        self._workspace_bytes += self._allocated() - before
        return _Entry(plan, ran, problem, eager)

    def _planned(self, problem: Any, choice: Choice) -> tuple[Plan, Choice]:
        """The plan of a choice, or the baseline's where a rank cannot make it."""
        known = variants(op_of(problem))
        plan, reason = None, None
        try:
            plan = known[choice.variant].plan(problem, self._fabric, choice.config)
            self._compile(problem, plan)
        except Exception as error:  # of a compiler: the peers must not wait for this rank's vote
            reason = one_line(error)
        reasons = [each for each in vote(self._fabric.group, reason) if each is not None]
        if plan is None or reasons:
            why = f"{choice.variant}: {reasons[0]}"
            choice = _falls_back("baseline", problem, why)
            plan = known["baseline"].plan(problem, self._fabric, {})
        return plan, choice

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError("the runtime is closed", "call taxfree.init() again")
        if self._process != os.getpid():
            raise UsageError(
                f"the runtime belongs to process {self._process}, of which this one is a fork",
                "start processes with the spawn method, and call taxfree.init() in each",
            )

    def _require_ours(self, problem: Any) -> None:
        world_size = getattr(problem, "world_size", None)
        if world_size is None:
            raise UsageError(f"{problem!r} is no problem", "for example taxfree.AllGatherMatmul")
        if world_size != self.world_size:
            raise UsageError(
                f"{problem} is for {world_size} ranks, this group has {self.world_size}",
                f"give the problem world_size={self.world_size}",
            )

    def _agreed(self, problem: Any, choice: Choice) -> Choice:
        """What all ranks run: the choice if all have made it, else the baseline.

        Raises:
            UsageError: on every rank, when one of them has come with another problem.
        """
        runs = [(each.variant, each.config) for each in (choice, choice.of("eager"))]
        answers = vote(self._fabric.group, (problem, runs))
        for rank, (other, _) in enumerate(answers):
            if other != problem:
                raise UsageError(
                    f"rank {self._fabric.rank} calls with {problem}, rank {rank} with {other}",
                    "all ranks make the same calls in the same order",
                )
        if all(theirs == runs for _, theirs in answers):
            return choice
        why = "ranks choose differently: their records or their hardware differ"
        return _falls_back("disabled", problem, why)

    def _compile(self, problem: Any, plan: Plan) -> None:
        found, device = operation(op_of(problem)), self._fabric.device
        if found.compile_inputs is None:
            inputs = found.make_inputs(problem, self._fabric.rank, 0, device)
        else:
            inputs = found.compile_inputs(problem, device)
        with compiling():
            plan(*inputs, found.empty_output(problem, device))

    def _allocated(self) -> int:
        if self._fabric.device.type != "cuda":
            return 0
        return torch.cuda.memory_allocated(self._fabric.device)

    # -- what it knows -----------------------------------------------------------------------

    def choice(self, problem: Any) -> Choice:
        """What runs, or would run, for a problem, and why."""
        entry = self._entries.get(problem)
        if entry is not None:
            return entry.choice
        return self._dispatcher.choose(op_of(problem), problem)

    def explain(self, problem: Any) -> str:
        """The choice for a problem, the reason, and the steps of the look-up, as text."""
        choice = self.choice(problem)
        lines = [f"{choice.variant} {choice.config or ''}".rstrip() + f" ({choice.kind})"]
        lines.append(f"because: {choice.why}")
        if choice.in_eager_calls:
            lines.append(choice.in_eager_calls)
        for rung in self._dispatcher.look_up(op_of(problem), problem).ladder:
            lines.append(f"{'+' if rung.found else '-'} {rung.looked_for}: {rung.why}")
        return "\n".join(lines)

    def stats(self) -> dict[str, dict[str, int]]:
        """Calls by problem (as text) and kind of choice."""
        found: dict[str, Counter[str]] = {}
        for problem, entry in self._entries.items():
            found.setdefault(str(problem), Counter())[entry.choice.kind] += entry.calls
        for problem, calls in self._unprepared.items():
            found.setdefault(str(problem), Counter())["unprepared"] += calls
        return {problem: dict(kinds) for problem, kinds in found.items()}

    def memory(self) -> Memory:
        """What this runtime holds; for one that is open."""
        self._require_open()
        return Memory(
            heap_bytes=self._heap_bytes,
            slot_bytes=self._fabric.pool.slot_bytes,
            workspace_bytes=self._workspace_bytes,
            plans=sum(1 + (entry.eager is not None) for entry in self._entries.values()),
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

    def close(self) -> None:
        """Give back the arena, the plans and the process group; collective.

        Every rank waits until all have come, then gives back its own. Later calls raise
        :class:`taxfree.UsageError`; closing again does nothing. If the process group has been
        destroyed, no rank waits for another. Graphs that were captured hold addresses of the arena:
        do not replay them any more.

        Raises:
            RuntimeError: a peer is lost; what this rank held is given back nevertheless.
        """
        if self._retire():
            self._fabric.close()

    def _release(self) -> None:
        """Give back what this rank holds, without its peers."""
        if self._retire():
            with contextlib.suppress(RuntimeError):  # of a device whose error was raised before
                self._fabric.release()

    def _retire(self) -> bool:
        """Forget all plans; whether this process has a fabric to give back."""
        if self._is_closed or self._process != os.getpid():
            return False
        self._is_closed = True
        _open.discard(self)
        if _runtimes.get(self.group_name) is self:
            del _runtimes[self.group_name]
        for held in (self._entries, self._by_arguments, self._numbers):
            held.clear()
        return True

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()  # the peers may never come


_runtimes: weakref.WeakValueDictionary[str, Runtime] = weakref.WeakValueDictionary()
_open: weakref.WeakSet[Runtime] = weakref.WeakSet()  # more than the above: two may share a group
_plans_of_parent: list[Any] = []


@atexit.register
def _release_all() -> None:
    """Give back what was never closed, while the interpreter still serves the groups' threads."""
    for runtime in list(_open):
        runtime._release()


def _after_fork() -> None:
    """Forget the parent's plans, so that each call asks whose runtime it is.

    They are kept: to free memory of a device is not this process's business.
    """
    for runtime in list(_open):
        _plans_of_parent.append((runtime._entries, runtime._by_arguments))
        runtime._entries, runtime._by_arguments = {}, {}
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


def vote(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Every rank's value, indexed by rank; collective.

    Raises:
        PeerTimeout: not all ranks joined within the process group's own timeout.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group)
    except RuntimeError as error:  # each backend says it in its own way
        raise PeerTimeout(
            f"rank {dist.get_rank(group)} waited in vain for its peers: "
            f"{str(error).partition(chr(10))[0]}",
            "all ranks make the same calls in the same order; one may have failed before",
        ) from error
    return values


def _falls_back(kind: Kind, problem: Any, why: str) -> Choice:
    """The baseline, with a warning that says why it runs."""
    warnings.warn(f"{problem} runs the baseline: {why}", RuntimeWarning, stacklevel=3)
    return Choice(kind, "baseline", why=why)


def _layout(tensor: torch.Tensor | None) -> Any:
    """The properties of a tensor that must equal those of the call that was checked."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _kind(tensor: torch.Tensor | None) -> Any:
    """As `_layout`, for a tensor that may have any strides."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _from_16_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and aligned to 16 bytes; a copy if it is not."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
