"""Executes decode steps of a tiny model for AMD: the twin's machine code, on all ranks.

    python decode_step.py ARCHITECTURE RANKS BATCH SEED...

Prints JSON: what each seed's run showed. The executor models two chiplets, so there are two here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from taxfree_check.checker import steps
from taxfree_check.executed.caches import GpuMemory
from taxfree_check.executed.program import Program
from taxfree_check.executed.run import (
    DEVICES,
    MOST_INSTRUCTIONS,
    NEVER,
    ExecutedCall,
    Host,
    Session,
)
from taxfree_kernels.decode_step.twin import TwinStep
from taxfree_kernels.hardware import KNOWN

CALLS, PROGRAMS = 3, 3
TOLERANCE = 1e-4  # of the largest logit, in float32


class Steps(Session):
    """A few calls of a step on all ranks."""

    def __init__(self, shown: ExecutedCall, programs: dict[str, Program]) -> None:
        hardware = replace(KNOWN[DEVICES[shown.architecture]], num_xcds=2)
        super().__init__(shown, hardware, MOST_INSTRUCTIONS, NEVER, None, programs)
        self._found: list[list[Any]] = [[] for _ in range(shown.problem.world_size)]

    def run(self) -> None:
        problem: Any = self._shown.problem
        self._memory = self.new_memory()
        fabrics = self._fabrics(problem.world_size, 1 << 12)
        self._gpus = [GpuMemory(self._memory) for _ in fabrics]
        model, hosts = steps.model(problem), []
        for rank, fabric in enumerate(fabrics):
            cache = steps.cache(problem, rank, 1)
            config = self._shown.config
            step = TwinStep(model.parts[rank], cache, problem.batch, fabric, config, PROGRAMS)
            calls = [partial(self._call, rank, step, number) for number in range(CALLS)]
            hosts.append(Host(rank, calls))
        try:
            self._execute(hosts)
        finally:
            for host in hosts:
                host.abandon()

    def _call(self, rank: int, step: TwinStep, number: int) -> None:
        problem: Any = self._shown.problem
        model = steps.model(problem)
        tokens = step(model.tokens[number], model.positions[number])
        self._found[rank].append((tokens, step.logits.clone()))

    def _difference(self, rank: int, call: int) -> torch.Tensor:
        """From logits in float64; tokens are theirs."""
        problem: Any = self._shown.problem
        exact = steps.exact(problem)[call]
        tokens, logits = self._found[rank][call]
        own = exact.chunk(problem.world_size, 1)[rank]
        difference = (logits.double() - own).abs() / (TOLERANCE * exact.abs().max())
        return torch.where((tokens == exact.argmax(1))[:, None], difference, float("inf"))


def main(architecture: str, ranks: str, batch: str, *seeds: str) -> None:
    """Run, and print."""
    problem: Any = steps.StepProblem(int(ranks), int(batch), layers=1, has_all=True)
    programs: dict[str, Program] = {}
    found = []
    for seed in seeds:
        config = {"SPLITS": 2, "DOWN_PARTS": 2}
        shown = ExecutedCall("decode_step", "twin", problem, config, architecture, int(seed))
        with np.errstate(all="ignore"):
            Steps(shown, programs).run()
        found.append(shown.as_json())
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
