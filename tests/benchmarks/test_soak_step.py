"""The soak of a decode step, on the host by the kernel's twin: it counts, goes on, and finds."""

from __future__ import annotations

from typing import Any

from taxfree_tune.tuning.steps import StepToTune
from tests.ranks import Ranks
from tests.tune.test_bench_model import MODEL


def soaked(fabric: Any) -> list[Any]:
    """Steps that repeat, and steps behind a key that has changed."""
    import torch

    from benchmarks import soak_step

    asked = StepToTune(MODEL, "bfloat16", fabric.world_size, batch=1, context=5)
    begun = [soak_step.begin(fabric, asked=asked, config={}, tokens=2) for _ in range(2)]
    right = soak_step.go_on(fabric, turns=2)
    keys = soak_step._soaks["one"]._step.cache.keys[0]
    keys.copy_(torch.roll(keys, 1, 2))
    return [begun[0] == begun[1], max(begun[0]["errors"]), right, soak_step.go_on(fabric, turns=2)]


def test_a_step_that_differs_is_counted(ranks: Ranks) -> None:
    for repeats, error, right, wrong in ranks.run(2, f"{__name__}:soaked"):
        assert repeats
        assert 0 < error < 0.02
        assert (right, wrong) == (0, 4)
