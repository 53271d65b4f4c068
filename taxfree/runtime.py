"""The dispatcher at run time: one per group of ranks and stream.

A call looks its arguments up in a dict and runs the plan found there. What is not there yet is
planned, which is collective: ahead of time by :meth:`Runtime.prepare`, or at the first eager call,
which all ranks make alike.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from taxfree import identity
from taxfree.devices import CONTROL_BYTES
from taxfree.dispatch import Choice, Dispatcher
from taxfree.errors import UsageError
from taxfree.settings import Settings
from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.open import choose, open_fabric
from taxfree_kernels.launch import compiling
from taxfree_kernels.variant import (
    Plan,
    op_of,
    operation,
    operation_names,
    problem_class,
    variants,
)
from taxfree_tuning_db import (
    Database,
    DatabaseMissing,
    Record,
    Table,
    default_path,
    shipped_records,
)

_GPU_SLOT_BYTES = 64 << 20
_HOST_SLOT_BYTES = 2 << 20
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass
class _Entry:
    plan: Plan
    choice: Choice
    problem: Any
    calls: int = 0


@dataclass(frozen=True)
class Memory:
    """What a runtime holds, in bytes.

    Args:
        heap_bytes: the symmetric heap: two slots for payloads, and control words.
        slot_bytes: the largest payload that fused plans can exchange.
        workspace_bytes: that plans hold beside the heap; counted on GPUs only.
        plans: number of plans.
    """

    heap_bytes: int
    slot_bytes: int
    workspace_bytes: int
    plans: int


class Runtime:
    """Runs operations on one group of ranks by what the tuning table says.

    Made by :func:`taxfree.init`. Belongs to one stream at a time. All ranks of the group make the
    same calls in the same order.
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
        self.group_name: str = fabric.group.group_name
        self.world_size = fabric.world_size
        _runtimes[self.group_name] = self

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
            a_shard: contiguous; for gather_dim 0 [ceil(m / world_size), k], the last ranks' with
                fewer rows or none when m is ragged; for gather_dim 1 [m, k / world_size].
                float16 or bfloat16.
            weight: [k, n] of the same dtype, one of its strides 1.
            bias: [n], or None.
            gather_dim: 0: shards are rows; 1: shards are columns.
            m: rows over all ranks; needed when gather_dim is 0 and they are not
                ``world_size * a_shard.shape[0]`` on every rank.
            out: [m, n], contiguous, to write into.

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
            return result
        arguments = (
            a_shard.shape, a_shard.dtype, a_shard.device, weight.shape, weight.stride(),
            weight.dtype, bias is None or bias.shape, gather_dim, m,
        )  # fmt: skip
        entry = self._by_arguments.get(arguments)
        if entry is None:
            problem = self._all_gather_matmul_problem(a_shard, weight, bias, gather_dim, m)
            entry = self._entry(problem)
            if entry.choice.kind != "unprepared":
                self._by_arguments[arguments] = entry
        if out is None:
            out = a_shard.new_empty(entry.problem.m, entry.problem.n)
        entry.calls += 1
        self._fabric.pool.check()
        return entry.plan(a_shard.contiguous(), weight, bias, out)

    def _all_gather_matmul_problem(
        self,
        a_shard: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gather_dim: int,
        m: int | None,
    ) -> Any:
        rank, world_size = self._fabric.rank, self._fabric.world_size
        _require(a_shard.dim() == 2 and weight.dim() == 2, "a_shard and weight must be matrices")
        _require(a_shard.dtype in _DTYPES, f"a_shard is {a_shard.dtype}, not float16 or bfloat16")
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                _require(tensor.dtype == a_shard.dtype, f"{name} is {tensor.dtype}, a_shard not")
                _require(
                    tensor.device == a_shard.device == self._fabric.device,
                    f"{name} is on {tensor.device}, a_shard on {a_shard.device}, the fabric on "
                    f"{self._fabric.device}",
                )
        _require(1 in weight.stride(), "neither stride of weight is 1")
        _require(gather_dim in (0, 1), f"gather_dim is {gather_dim}, must be 0 or 1")
        rows, columns = a_shard.shape
        k, n = weight.shape
        if gather_dim == 0:
            m = m if m is not None else rows * world_size
        else:
            columns *= world_size
            m = m if m is not None else rows
        _require(columns == k, f"the gathered A has {columns} columns, weight {k} rows")
        _require(bias is None or bias.shape == (n,), f"bias is not [{n}]")
        problem = problem_class("all_gather_matmul")(
            m=m, n=n, k=k, gather_dim=gather_dim, dtype=_DTYPES[a_shard.dtype],
            world_size=world_size, weight_layout="nk" if weight.stride(0) == 1 else "kn",
            bias=bias is not None,
        )  # fmt: skip
        own_rows = problem.rows_of(rank)
        _require(rows == own_rows, f"a_shard has {rows} rows, rank {rank} of m={m} has {own_rows}")
        return problem

    def call(
        self, problem: Any, tensors: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> torch.Tensor:
        """Run the operation of a given problem; its tensors are not checked against it."""
        entry = self._entries.get(problem) or self._entry(problem)
        entry.calls += 1
        self._fabric.pool.check()
        return entry.plan(*tensors, out)

    # -- planning ----------------------------------------------------------------------------

    def prepare(self, problems: Iterable[Any]) -> None:
        """Plan and compile problems ahead of time; collective.

        Args:
            problems: such as :class:`taxfree.AllGatherMatmul`.
        """
        for problem in problems:
            if problem not in self._entries:
                self._entries[problem] = self._plan(problem, self.choice(problem))
        self._fabric.barrier()

    def _entry(self, problem: Any) -> _Entry:
        entry = self._entries.get(problem)
        if entry is not None:
            return entry
        if _is_capturing():
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
                stacklevel=4,
            )
        self._unprepared[problem] += 1
        choice = Choice("unprepared", "baseline", why=why)
        plan = variants(op_of(problem))["baseline"].plan(problem, self._fabric, {})
        return _Entry(plan, choice, problem)

    def _plan(self, problem: Any, choice: Choice) -> _Entry:
        self._require_same(problem)
        known = variants(op_of(problem))
        before = self._allocated()
        plan, reason = None, None
        try:
            plan = known[choice.variant].plan(problem, self._fabric, choice.config)
            self._compile(problem, plan)
        except PlanError as error:
            reason = error.message
        reasons = [each for each in _vote(self._fabric, reason) if each is not None]
        if plan is None or reasons:
            choice = Choice("baseline", "baseline", why=f"{choice.variant}: {reasons[0]}")
            plan = known["baseline"].plan(problem, self._fabric, {})
        self._workspace_bytes += self._allocated() - before
        return _Entry(plan, choice, problem)

    def _require_same(self, problem: Any) -> None:
        """Raise on every rank when one of them has come with another problem."""
        for rank, other in enumerate(_vote(self._fabric, problem)):
            if other != problem:
                raise UsageError(
                    f"rank {self._fabric.rank} calls with {problem}, rank {rank} with {other}",
                    "all ranks make the same calls in the same order",
                )

    def _compile(self, problem: Any, plan: Plan) -> None:
        found = operation(op_of(problem))
        inputs = found.make_inputs(problem, self._fabric.rank, 0, self._fabric.device)
        with compiling():
            plan(*inputs, found.empty_output(problem, self._fabric.device))

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
        """What would run for a problem and why, with the ladder of the look-up, as text."""
        choice = self.choice(problem)
        lines = [f"{choice.variant} {choice.config or ''}".rstrip() + f" ({choice.kind})"]
        lines.append(f"because: {choice.why}")
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
        """What this runtime holds."""
        return Memory(
            heap_bytes=self._heap_bytes,
            slot_bytes=self._fabric.pool.slot_bytes,
            workspace_bytes=self._workspace_bytes,
            plans=len(self._entries),
        )

    def check(self) -> None:
        """Wait for this rank's device, then look whether a peer was lost.

        Raises:
            PeerTimeout: a wait exceeded its bound; the results since are NaN.
        """
        self._fabric.synchronize()
        self._fabric.pool.check()

    def reset(self) -> None:
        """Make the runtime usable after a lost peer; collective, all ranks alive."""
        self._fabric.pool.reset()

    def close(self) -> None:
        """Give the symmetric heap back; collective."""
        _runtimes.pop(self.group_name, None)
        self._fabric.close()


_runtimes: weakref.WeakValueDictionary[str, Runtime] = weakref.WeakValueDictionary()


def runtime_of(group_name: str) -> Runtime:
    """The runtime of a process group, by the group's name.

    Raises:
        UsageError: there is none.
    """
    runtime = _runtimes.get(group_name)
    if runtime is None:
        raise UsageError(f"no taxfree runtime on group {group_name!r}", "call taxfree.init() first")
    return runtime


def init(
    group: dist.ProcessGroup | None = None,
    heap_bytes: int | None = None,
    timeout_s: float | None = None,
    plan_on_first_call: bool = True,
    db: str | Path | None = None,
) -> Runtime:
    """Open a fabric on a group and load the tuning table; collective.

    Args:
        group: the ranks; None for the default group, which must be initialised.
        heap_bytes: symmetric memory of each rank; by default two slots of the largest problem in
            the table, at least of 64 MiB (2 MiB on the host fabric).
        timeout_s: bound of a wait for a peer in seconds; by default ``TAXFREE_TIMEOUT`` or 30.
        plan_on_first_call: plan an unprepared problem at its first eager call; else it runs the
            baseline.
        db: the tuning database; by default ``TAXFREE_DB`` or the user's.

    Raises:
        UsageError: there is no process group.
        FabricUnavailable: no fabric serves here; the message says why.
    """
    if not dist.is_initialized():
        raise UsageError(
            "no process group", "call torch.distributed.init_process_group() before taxfree.init()"
        )
    importlib.import_module("taxfree.ops")  # registers the torch ops, which call back into here
    settings = Settings.from_environment()
    records = _agreed_records(group, Path(db) if db is not None else None, settings)
    if records is None:
        settings, records = dataclasses.replace(settings, disable=True), []
    if heap_bytes is None:
        heap_bytes = _heap_bytes(records)
    fabric = open_fabric("auto", group, heap_bytes, timeout_s or settings.timeout_s)
    table = Table(user=records, shipped=shipped_records())
    dispatcher = Dispatcher(table, fabric.hardware, settings)
    return Runtime(fabric, dispatcher, plan_on_first_call, heap_bytes)


def _agreed_records(
    group: dist.ProcessGroup | None, path: Path | None, settings: Settings
) -> list[Record] | None:
    """Rank 0's table, if all ranks run the same sources under the same settings; else None."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    table: list[Any] = [_read_table(path or settings.db) if rank == 0 else None]
    dist.broadcast_object_list(table, group=group, group_src=0)
    own = (settings.steering(), {op: identity.kernel_hashes(op) for op in operation_names()})
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, own, group)
    differing = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if differing:
        if rank == 0:
            warnings.warn(
                f"taxfree runs the baseline only: ranks {differing} differ from rank 0 in their "
                "environment (TAXFREE_*) or in the kernels' sources",
                RuntimeWarning,
                stacklevel=3,
            )
        return None
    return [Record.from_json(document) for document in table[0]]


def _read_table(path: Path | None) -> list[dict[str, Any]]:
    try:
        with Database(path or default_path(), read_only=True) as database:
            return [record.to_json() for record in database.records()]
    except DatabaseMissing:
        return []  # nothing tuned yet: what is shipped, else the baseline


def _heap_bytes(records: Sequence[Record]) -> int:
    slot = _HOST_SLOT_BYTES if choose() == "host" else _GPU_SLOT_BYTES
    for record in records:
        slot = max(slot, problem_class(record.op)(**record.problem).slot_bytes)
    return 2 * slot + CONTROL_BYTES


def _vote(fabric: Fabric, value: Any) -> list[Any]:
    values: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(values, value, fabric.group)
    return values


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message, "see Runtime.all_gather_matmul for what the tensors must be")
