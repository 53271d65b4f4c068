"""Trials of candidates in rank workers: compile, check, time. All ranks vote on every step.

A candidate must be correct on every rank before it is timed: exact on small integers, and on random
data with an error against a float64 reference of at most 1.25 times the library's own, and what the
problem permits besides.
"""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
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
_REPETITION_US = 4000.0

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
        wrong: values that differ on small-integer inputs, over all ranks.
    """

    state: str
    reason: str = ""
    timings: dict[str, timer.Timing] = field(default_factory=dict)
    relative_error: float | None = None
    launches: int = 0
    seconds: float = 0.0
    disturbed: str = ""
    wrong: int = 0


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
        shared = first[: self.operation.shared]
        alone = first[len(shared) :]
        copies = timer.copies_needed(fabric, sum(t.nbytes for t in alone if t is not None))
        others = (self._inputs(SEED + copy)[len(shared) :] for copy in range(1, copies))
        self.inputs = [first, *((*shared, *other) for other in others)]
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
        exact = self._reference(integers=True)
        self._exact = exact.to(self.result(self.outputs[0]).dtype)
        self._reference64 = self._reference(integers=False)
        self._baseline = self.plan(Candidate("baseline", {}))
        self.baseline_error = self._worst(self._relative_error(self._baseline))
        #: candidates that were right and timed last, as text with the modes
        self.right: dict[tuple[str, ...], Right] = {}

    @cached_property
    def chain(self) -> int:
        """Calls of a repetition, fewer of long ones; collective at first."""
        call = self.call(self._baseline), "eager"
        (once,) = timer.time_together(self.fabric, [call], 1, chain=1)
        return timer.chain_for(self.fabric, once.median_us, _REPETITION_US)

    def _reference(self, integers: bool) -> torch.Tensor:
        fabric = self.fabric
        return self.operation.reference(
            self.problem, fabric.rank, SEED, fabric.device, integers=integers
        )

    # -- correctness -------------------------------------------------------------------------

    def _relative_error(self, compute: Compute) -> float:
        return self.error_of(compute(*self.inputs[0], self.outputs[0].fill_(float("nan"))))

    def result(self, out: torch.Tensor) -> torch.Tensor:
        """What is compared of an output."""
        return self.operation.result(self.problem, out)

    def error_of(self, out: torch.Tensor) -> float:
        """The relative error on this rank of a result on the first inputs."""
        error = float((self.result(out).double() - self._reference64).norm())
        norm = float(self._reference64.norm())
        return error / norm if norm else error  # a rank's share of the result may be all zero

    def _worst(self, error: float) -> float:
        return float(max(vote(self.fabric.group, error if error == error else float("inf"))))

    def check(self, compute: Compute) -> Outcome:
        """Whether a plan is "wrong" on some rank, or right: "measured", without times."""
        out = self.result(compute(*self._integers, self.outputs[0].fill_(float("nan"))))
        wrong = int((out != self._exact).sum())
        error = self._worst(self._relative_error(compute))
        wrong_by_rank = vote(self.fabric.group, wrong)
        reason = ""
        if any(wrong_by_rank):
            rank = next(r for r, count in enumerate(wrong_by_rank) if count)
            reason = f"{wrong_by_rank[rank]} of {out.numel()} values wrong on rank {rank}"
        elif error > ERROR_ALLOWANCE * self.baseline_error + self.problem.permitted_error:
            reason = f"relative error {error:.2e}, the baseline has {self.baseline_error:.2e}"
        state = "wrong" if reason else "measured"
        return Outcome(state, reason, relative_error=error, wrong=sum(wrong_by_rank))


_bench: Bench | None = None


def open_bench(fabric: Fabric, op: str, problem: dict[str, Any]) -> Bench:
    """The bench for a problem; kept from one task to the next, as inputs are large."""
    global _bench
    if _bench is None or _bench.op != op or _bench.problem != problem_class(op)(**problem):
        _drop_bench()
        _bench = Bench(fabric, op, problem)
    return _bench


def _drop_bench() -> None:
    global _bench
    if _bench is None:
        return
    _bench.right.clear()  # whose calls hold the bench
    last, _bench = weakref.ref(_bench), None
    if last() is not None:  # the traceback of an error holds it
        gc.collect()


def warm_bench(fabric: Fabric, op: str, problem: dict[str, Any]) -> None:
    """Open a problem's bench for the tasks that follow; a task of the workers."""
    open_bench(fabric, op, problem)


def close_bench() -> None:
    """Free the inputs of the last problem."""
    _drop_bench()
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
    watch = disturbance.DisturbanceWatch(fabric)
    bench = open_bench(fabric, op, problem)
    keys = [(key(candidate), *modes) for candidate in candidates]
    bench.right = {checked: bench.right[checked] for checked in keys if checked in bench.right}
    new = [c for c, checked in zip(candidates, keys, strict=True) if checked not in bench.right]
    bench.share_compilation(new)
    tried = [
        bench.right[checked] if checked in bench.right else _check(bench, candidate)
        for candidate, checked in zip(candidates, keys, strict=True)
    ]
    outcomes = [outcome.outcome() if isinstance(outcome, Right) else outcome for outcome in tried]
    right = [outcome for outcome in tried if isinstance(outcome, Right)]
    runs = [run for candidate in right for run in candidate.runs_of(bench, modes)]
    timings = iter(timer.time_runs(fabric, runs, repetitions, bench.chain))
    disturbed = watch.reasons()
    for outcome in outcomes:
        if outcome.state == "measured":
            outcome.timings = {mode: next(timings) for mode in modes}
            outcome.disturbed = disturbed
    hang = bench.hang()
    if hang is not None:
        bench.right.clear()
        raise PeerTimeout(hang, "a candidate that was right when checked hung when timed")
    bench.right = {
        checked: outcome
        for checked, outcome in zip(keys, tried, strict=True)
        if isinstance(outcome, Right)
    }  # now, when it has come to its end on all ranks
    return outcomes


@dataclass
class Right:
    """A candidate that was right, for finals after a search: neither checked nor captured again.

    Args:
        plan: that can be called.
        relative_error: as of :class:`Outcome`.
        runs: of chains of its calls, by mode.
    """

    plan: Ready
    relative_error: float | None
    runs: dict[str, timer.Run] = field(default_factory=dict)

    def outcome(self) -> Outcome:
        """That of a trial which is not timed yet."""
        return Outcome("measured", relative_error=self.relative_error, launches=self.plan.launches)

    def runs_of(self, bench: Bench, modes: Sequence[str]) -> list[timer.Run]:
        """What runs chains of its calls, in each mode; collective at first."""
        if not self.runs:
            call = bench.call(self.plan)
            self.runs = {
                mode: timer.runner(bench.fabric, call, mode, bench.chain) for mode in modes
            }
        return list(self.runs.values())


def _check(bench: Bench, candidate: Candidate) -> Outcome | Right:
    plan = bench.ready(candidate)
    if isinstance(plan, str):
        return Outcome("failed", plan)
    checked = bench.check(plan)
    hang = bench.hang()
    if hang is not None:
        return Outcome("hung", hang)
    return checked if checked.state == "wrong" else Right(plan, checked.relative_error)
