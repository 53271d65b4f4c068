"""What rank workers run for the tests of flash_decode: each function takes the open fabric."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode.operation import OPERATION
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.variant import Plan, variants
from tests.kernels.tasks import everybodys, private, shaken

OP = OPERATION.name


@dataclass(frozen=True)
class Case:
    """A variant on a problem; the variant's default config when None."""

    variant: str
    fields: Mapping[str, Any]
    config: Mapping[str, Any] | None = None

    def problem(self, world_size: int) -> FlashDecode:
        return FlashDecode(**self.fields, world_size=world_size)

    def plan(self, fabric: Fabric) -> Plan:
        variant, problem = variants(OP)[self.variant], self.problem(fabric.world_size)
        config = self.config or variant.first_configs(problem, fabric.hardware)[0]
        return variant.plan(problem, fabric, config)


class Inputs:
    """One set of inputs of a case, and the result in float64 from what the ranks really hold."""

    def __init__(self, fabric: Fabric, case: Case, seed: int, integers: bool) -> None:
        self._fabric, self._problem = fabric, case.problem(fabric.world_size)
        self.tensors = OPERATION.make_inputs(
            self._problem, fabric.rank, seed, fabric.device, integers=integers
        )

    def set_lengths(self, lengths: Sequence[Sequence[int]]) -> None:
        """Change the keys that each rank holds of each sequence, where they stand."""
        self.tensors[3].copy_(torch.tensor(lengths, dtype=torch.int32))

    def run(self, plan: Plan) -> torch.Tensor:
        out = OPERATION.empty_output(self._problem, self._fabric.device).fill_(float("nan"))
        assert plan(*self.tensors, out) is out
        return out

    @property
    def exact(self) -> torch.Tensor:
        """By softmax over all visible keys of a sequence at once."""
        problem, (q, _, _, kv_lens, _, scaling) = self._problem, self.tensors
        scale, cap = scaling.double()
        caches = everybodys(self._fabric, self._dense())
        results = []
        for sequence in range(problem.batch):
            k, v = (
                torch.cat(
                    [
                        caches[rank][which][sequence, : kv_lens[rank, sequence]]
                        for rank in range(problem.world_size)
                    ]
                )[-problem.window :]
                for which in (0, 1)
            )
            k, v = (each.repeat_interleave(problem.group_size, 1).double() for each in (k, v))
            logits = torch.einsum("hd,nhd->hn", q[sequence].double(), k) * scale
            if problem.soft_cap:
                logits = cap * torch.tanh(logits / cap)
            weights = torch.softmax(logits, 1) if len(k) else logits
            results.append(torch.einsum("hn,nhd->hd", weights, v))
        return torch.stack(results)

    def _dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        _, k, v, _, table, _ = self.tensors
        if table is None:
            return k, v
        return k[table.long()].flatten(1, 2), v[table.long()].flatten(1, 2)

    def relative_error(self, out: torch.Tensor) -> float:
        exact = self.exact
        return float((out.double() - exact).norm() / exact.norm())


def complaints(fabric: Fabric, cases: Sequence[Case], random_data: bool = True) -> list[str]:
    """What is wrong on this rank with cases that run one after another on the fabric's pool."""
    found = []
    for case in cases:
        plan, inputs = case.plan(fabric), Inputs(fabric, case, seed=1, integers=True)
        out, exact = inputs.run(plan), inputs.exact
        wrong = int((out != exact.to(out.dtype)).sum())
        if wrong:
            found.append(f"{case}: {wrong} of {out.numel()} values wrong on integers")
        if random_data:
            found += _inaccuracy(fabric, case, plan)
        fabric.pool.check()
    return found


def _inaccuracy(fabric: Fabric, case: Case, plan: Plan) -> list[str]:
    inputs = Inputs(fabric, case, seed=2, integers=False)
    out = inputs.run(plan)
    error, found = inputs.relative_error(out), []
    baseline = Case("baseline", case.fields).plan(fabric)
    allowed = 1.25 * inputs.relative_error(inputs.run(baseline))
    if not error <= allowed <= 0.01:
        found.append(f"{case}: relative error {error:.2e}, {allowed:.2e} is allowed")
    if not all(torch.equal(out, other) for other in everybodys(fabric, out)):
        found.append(f"{case}: outputs differ between ranks")
    return found


def lengths_change(
    fabric: Fabric, case: Case, lengths: Sequence[Sequence[Sequence[int]]]
) -> list[str]:
    """Complaints of calls of one plan on the same tensors, whose lengths change in between."""
    plan, inputs = case.plan(fabric), Inputs(fabric, case, seed=4, integers=False)
    found = []
    for each in lengths:
        inputs.set_lengths(each)
        error = float((inputs.run(plan).double() - inputs.exact).abs().max())
        if not error <= 0.01 * any(chain(*each)):  # without keys, zeros
            found.append(f"{case} with {each}: off by {error:.2e}")
    fabric.pool.check()
    return found


def back_to_back(
    fabric: Fabric, cases: Sequence[Case], generations: int, first_generation: int = 0
) -> list[str]:
    """Complaints of calls that take turns on one pool, with delays and without a barrier."""
    with private(fabric) as own:
        plans = [case.plan(own) for case in cases]
        inputs = [
            Inputs(own, cases[call % len(cases)], seed=call, integers=True)
            for call in range(generations)
        ]
        exact = [each.exact for each in inputs]
        own.pool.reset(first_generation)
        outputs = []
        with shaken(own.rank, 0.2 if own.rank == 0 else 0.004):  # rank 0 lags far behind
            for call in range(generations):
                if call % own.world_size == own.rank:
                    time.sleep(0.02)
                outputs.append(inputs[call].run(plans[call % len(plans)]))
        own.pool.check()
        return [
            f"call {call} of {cases[call % len(cases)].variant}: {wrong} values wrong"
            for call, out in enumerate(outputs)
            if (wrong := int((out != exact[call].to(out.dtype)).sum()))
        ]


def bits_of_calls(fabric: Fabric, case: Case, calls: int) -> list[bytes]:
    """The outputs of calls on the same random inputs, with other delays each time."""
    with private(fabric) as own:
        plan, inputs = case.plan(own), Inputs(own, case, seed=3, integers=False)
        found = []
        for call in range(calls):
            with shaken(10 * call + own.rank, 0.01):
                found.append(inputs.run(plan).view(torch.int16).numpy().tobytes())
        own.pool.check()
        return found


def reference_error(fabric: Fabric, case: Case) -> float:
    """How far the operation's reference, which sees no peer, is from what the ranks hold."""
    worst = 0.0
    for integers in (True, False):
        inputs = Inputs(fabric, case, seed=3, integers=integers)
        problem = case.problem(fabric.world_size)
        found = OPERATION.reference(problem, fabric.rank, 3, fabric.device, integers=integers)
        worst = max(worst, float((found - inputs.exact).abs().max()))
    return worst
