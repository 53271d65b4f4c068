"""What rank workers run for the tests of clock readings: each function takes the open fabric."""

from __future__ import annotations

import time
from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Step, variants
from taxfree_tune.measuring.trial import Candidate, open_bench
from taxfree_tune.profiling import clock_sync, step_timer


def late_rank(fabric: Fabric, seconds: float, repetitions: int) -> step_timer.TimedPipeline:
    """A barrier as the collective, and a consumer that takes longer on the last rank."""
    late = fabric.rank == fabric.world_size - 1
    data = torch.ones(1000)

    def steps(_: int) -> list[Step]:
        return [
            Step("compute", "copy", lambda: time.sleep(seconds * late), memory_bytes=8),
            Step("barrier", "collective", fabric.barrier, latency_probe=fabric.barrier),
            Step("sum", "consumer", lambda: data.sum(), reads=data, memory_bytes=data.nbytes),
        ]

    def call(index: int) -> None:
        for step in steps(index):
            step.run()

    return step_timer.time_steps(fabric, call, steps, repetitions)


def clocks(fabric: Fabric, rounds: int) -> Any:
    """How far this rank's clock seems to be from that of rank 0, though they are the same."""
    return clock_sync.exchange_clocks(fabric, rounds)


def steps_and_call(fabric: Fabric, op: str, variant: str, problem: dict[str, Any]) -> list[str]:
    """Run the steps of a variant one by one; the kinds of steps, if that gives what a call does."""
    bench = open_bench(fabric, op, problem)
    found = variants(op)[variant]
    (config, *_) = found.seed_configs(bench.problem, fabric.hardware)
    plan = bench.plan(Candidate(variant, config))
    whole = plan(*bench.inputs[0], bench.outputs[0]).clone()
    parts = bench.outputs[0].fill_(float("nan"))
    steps = plan.steps(*bench.inputs[0], parts)
    for step in steps:
        if step.latency_probe is not None:
            step.latency_probe()
        step.run()
    assert torch.equal(whole, parts)
    return [step.kind for step in steps]
