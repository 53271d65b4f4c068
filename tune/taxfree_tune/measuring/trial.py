"""Trials of candidates in rank workers: compile, check, time. All ranks vote on every step.

A candidate must be correct on every rank before it is timed: exact on small integers, and on random
data with an error against a float64 reference of at most 1.25 times the library's own.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from taxfree._runtime.collectives import Failure, vote
from taxfree._runtime.ready import ready_plans
from taxfree.errors import TaxfreeError
from taxfree.fingerprints import rows_field
from taxfree_kernels.errors import PeerTimeout
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Launcher
from taxfree_kernels.variant import Config, Plan, Ready, operation, problem_class, variants
from taxfree_tune.measuring import disturbance, timer

ERROR_ALLOWANCE = 1.25  # of the library baseline's own relative error
SEED = 1

#: a plan, or what takes its place: of the operation's inputs and the output, which it returns
Compute = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Candidate:
    """A variant and its config."""

    variant: str
    config: Config


def key(candidate: Candidate) -> str:
    """A candidate as text, the same for equal ones."""
    return json.dumps(
        {"variant": candidate.variant, "config": dict(candidate.config)}, sort_keys=True
    )


@dataclass
class Outcome:
    """The outcome of trying a candidate.

    Args:
        state: "measured", "refused" (by its variant or the screen), "failed" (does not compile or
            plan), "wrong", "hung", or "crashed".
        reason: why it was not measured.
        timings: mode -> timing.
        relative_error: Frobenius norm of (result - reference) over that of the reference; the
            worst rank's.
        launches: kernels of one call, collectives counted as one.
        seconds: its share of the time that its batch took.
        disturbed: why its times cannot be trusted; see `taxfree_tune.measuring.disturbance`.
    """

    state: str
    reason: str = ""
    timings: dict[str, timer.Timing] = field(default_factory=dict)
    relative_error: float | None = None
    launches: int = 0
    seconds: float = 0.0
    disturbed: str = ""


class Calls:
    """One problem made ready on one rank: plans, and inputs that change from call to call.

    Args:
        fabric: of this rank.
        op, problem: the operation's name, and its problem's fields.
    """

    def __init__(self, fabric: Fabric, op: str, problem: dict[str, Any]) -> None:
        self.fabric, self.op = fabric, op
        self.operation = operation(op)
        self.problem = problem_class(op)(**problem)
        first = self._inputs(SEED)
        copies = timer.copies_needed(fabric, sum(t.nbytes for t in first if t is not None))
        self.inputs = [first, *(self._inputs(SEED + copy) for copy in range(1, copies))]
        empty = partial(self.operation.empty_output, self.problem, fabric.device)
        self.outputs = [empty().fill_(float("nan")) for _ in range(copies)]

    def _inputs(self, seed: int, integers: bool = False) -> tuple[torch.Tensor | None, ...]:
        fabric = self.fabric
        return self.operation.make_inputs(
            self.problem, fabric.rank, seed, fabric.device, integers=integers
        )

    def call(self, compute: Compute) -> timer.Call:
        """Calls of a plan, whose inputs change with each step."""

        def run(step: int) -> None:
            copy = step % len(self.inputs)
            compute(*self.inputs[copy], self.outputs[copy])

        return run

    def share_compilation(self, candidates: Sequence[Candidate]) -> None:
        """Compile a share of the candidates on each rank; the others then hit Triton's cache."""
        rank, world_size = self.fabric.rank, dist.get_world_size(self.fabric.group)
        fused = [c for c in candidates if variants(self.op)[c.variant].fused]
        for candidate in fused[rank::world_size]:
            with contextlib.suppress(Exception):  # all ranks meet it again, and vote on it
                self.compiled(candidate)
        self.fabric.barrier()

    def ready(self, candidate: Candidate) -> Ready | str:
        """A plan that can be called, or why some rank has none; collective."""
        plan = ready_plans(self.fabric, [partial(self.compiled, candidate)])[0]
        return plan.why if isinstance(plan, Failure) else plan

    def plan(self, candidate: Candidate) -> Ready:
        """The same, where a plan is expected.

        Raises:
            TaxfreeError: some rank has none.
        """
        plan = self.ready(candidate)
        if isinstance(plan, str):
            raise TaxfreeError(f"{candidate.variant} cannot be planned: {plan}")
        return plan

    def compiled(self, candidate: Candidate, launcher: Launcher | None = None) -> Plan:
        """A plan whose kernels the compiler has had, or `launcher` in its place."""
        variant = variants(self.op)[candidate.variant]
        plan = variant.plan(self.problem, self.fabric, candidate.config)
        size = getattr(self.problem, rows_field(self.op))
        plan.compile(size, *self.inputs[0], self.outputs[0], launcher=launcher)
        return plan

    def hang(self) -> str | None:
        """As the function of this name."""
        return hang(self.fabric)


def hang(fabric: Fabric) -> str | None:
    """Who timed out waiting for whom so far, or None; the pools are reset and work again.

    Collective.
    """
    fabric.synchronize()
    pools, own_timeout = (fabric.pool, fabric.device_barrier.pool), None
    for pool in pools:
        try:
            pool.check_at_rest()
        except PeerTimeout as error:
            own_timeout = own_timeout or (error.is_secondary, error.message)
    timeouts = [timeout for timeout in vote(fabric.group, own_timeout) if timeout is not None]
    if not timeouts:
        return None
    for pool in pools:
        pool.reset()
    # who waited comes before whoever followed
    _, message = min(timeouts, key=lambda timeout: timeout[0])
    return str(message)


class Bench(Calls):
    """A problem's calls, the results that they should have, and what the baseline's error is."""

    def __init__(self, fabric: Fabric, op: str, problem: dict[str, Any]) -> None:
        super().__init__(fabric, op, problem)
        self._integers = self._inputs(SEED, integers=True)
        self._exact = self._reference(integers=True).to(self.outputs[0].dtype)
        self._reference64 = self._reference(integers=False)
        baseline = self.plan(Candidate("baseline", {}))
        self.baseline_error = self._worst(self._relative_error(baseline))

    def _reference(self, integers: bool) -> torch.Tensor:
        fabric = self.fabric
        return self.operation.reference(
            self.problem, fabric.rank, SEED, fabric.device, integers=integers
        )

    # -- correctness -------------------------------------------------------------------------

    def _relative_error(self, compute: Compute) -> float:
        return self.error_of(compute(*self.inputs[0], self.outputs[0].fill_(float("nan"))))

    def error_of(self, out: torch.Tensor) -> float:
        """The relative error on this rank of a result on the first inputs."""
        error = float((out.double() - self._reference64).norm())
        norm = float(self._reference64.norm())
        return error / norm if norm else error  # a rank's share of the result may be all zero

    def _worst(self, error: float) -> float:
        return float(max(vote(self.fabric.group, error if error == error else float("inf"))))

    def check(self, compute: Compute) -> tuple[str | None, float]:
        """Why a plan is wrong on some rank, or None; and its relative error, the worst rank's."""
        out = compute(*self._integers, self.outputs[0].fill_(float("nan")))
        wrong = int((out != self._exact).sum())
        error = self._worst(self._relative_error(compute))
        wrong_by_rank = vote(self.fabric.group, wrong)
        if any(wrong_by_rank):
            rank = next(r for r, count in enumerate(wrong_by_rank) if count)
            return f"{wrong_by_rank[rank]} of {out.numel()} values wrong on rank {rank}", error
        if error > ERROR_ALLOWANCE * self.baseline_error:
            return f"relative error {error:.2e}, the baseline has {self.baseline_error:.2e}", error
        return None, error


_bench: Bench | None = None


def open_bench(fabric: Fabric, op: str, problem: dict[str, Any]) -> Bench:
    """The bench for a problem; kept from one task to the next, as inputs are large."""
    global _bench
    if _bench is None or _bench.op != op or _bench.problem != problem_class(op)(**problem):
        _bench = None
        gc.collect()
        _bench = Bench(fabric, op, problem)
    return _bench


def close_bench() -> None:
    """Free the inputs of the last problem."""
    global _bench
    _bench = None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def try_candidates(
    fabric: Fabric,
    op: str,
    problem: dict[str, Any],
    candidates: Sequence[Candidate],
    modes: Sequence[str],
    repetitions: int,
) -> list[Outcome]:
    """Check candidates and time those that are right, together; a task of the workers.

    Returns:
        One outcome per candidate, the same on every rank.
    """
    watch = disturbance.Watch(fabric)
    bench = open_bench(fabric, op, problem)
    bench.share_compilation(candidates)
    outcomes, ready = [], []
    for candidate in candidates:
        outcome, plan = _check(bench, candidate)
        outcomes.append(outcome)
        if plan is not None:
            ready.append((outcome, plan))
    calls = []
    for outcome, plan in ready:
        for mode in modes:
            calls.append((bench.call(plan), mode, outcome))
    timings = timer.time_together(fabric, [(call, mode) for call, mode, _ in calls], repetitions)
    for (_, mode, outcome), timing in zip(calls, timings, strict=True):
        outcome.timings[mode] = timing
    disturbed = watch.reasons()
    for outcome, _ in ready:
        outcome.disturbed = disturbed
    hang = bench.hang()
    if hang is not None:
        raise PeerTimeout(hang, "a candidate that was right when checked hung when timed")
    return outcomes


def _check(bench: Bench, candidate: Candidate) -> tuple[Outcome, Ready | None]:
    plan = bench.ready(candidate)
    if isinstance(plan, str):
        return Outcome("failed", plan), None
    why_wrong, error = bench.check(plan)
    hang = bench.hang()
    if hang is not None:
        return Outcome("hung", hang), None
    if why_wrong is not None:
        return Outcome("wrong", why_wrong, relative_error=error), None
    return Outcome("measured", relative_error=error, launches=plan.launches), plan
