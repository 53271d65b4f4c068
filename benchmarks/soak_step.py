"""Runs a decode step's kernel very often: every result has the bits of the first, and is right.

    python -m benchmarks.soak_step --model llama-3.1-8b --layers 4 --gpus 2 --steps 100000

Some tokens take turns behind one context. Their first logits are compared with float64, as a bench
does. All later ones, in replays of a graph, have the same bits on each rank; they are compared on
the device. The record says how many steps ran and what the first logits hash to. With --out, a run
that ended at its --seconds goes on from there, and its first logits must hash to the same. The soak
stops at the first mismatch (exit code 4) or lost peer (5).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.commands import exit_code, keep, parser, positive
from taxfree.errors import TaxfreeError, WrongResult
from taxfree.models.step_records import StepChoice
from taxfree_kernels.fabric.base import Fabric
from taxfree_tune import devices
from taxfree_tune.benching.model import model_to_bench
from taxfree_tune.benching.model_tasks import Bench, Phase
from taxfree_tune.measuring.groups import group_for
from taxfree_tune.measuring.timer import capturing
from taxfree_tune.measuring.trial import ERROR_ALLOWANCE
from taxfree_tune.tuning.steps import StepToTune

FOLDER = Path(__file__).parent / "results" / "soak"
DEADLINE_S = 1800.0
_ROUND_S = 20.0  # of steps between two looks at what was found
_BITS = {2: torch.int16, 4: torch.int32}


class StepSoak:
    """Steps of one rank: what they should give, and what differed."""

    def __init__(self, fabric: Fabric, asked: StepToTune, config: dict[str, int], tokens: int):
        self._fabric = fabric
        phase = Phase("decode", asked.batch, asked.context)
        bench = Bench(fabric, asked.model, getattr(torch, asked.dtype), phase, [])
        step = bench.step(StepChoice("kernel", config))[2]
        if not step.ran.startswith("one kernel"):
            raise TaxfreeError(f"no kernel to soak: {step.ran}")
        self._step, device = step, fabric.device
        allowed = ERROR_ALLOWANCE * bench.error(
            bench.call("torch", "eager")(), bench.exact_logits()
        )
        drawn = torch.Generator().manual_seed(7)
        vocabulary = asked.model.vocabulary
        self._tokens = torch.randint(vocabulary, (tokens, asked.batch), generator=drawn).to(device)
        self._given = self._tokens[0].clone()
        self._positions = torch.full_like(self._given, asked.context, dtype=torch.int32)
        self.errors = []
        first, chosen = [], []
        for token in self._tokens:
            self._given.copy_(token)
            chosen.append(step(self._given, self._positions).clone())
            first.append(step._kernel.logits.clone())
            error = bench.error(step.logits, bench.exact_logits(token))
            self.errors.append(error)
            if not error <= allowed:
                raise WrongResult(f"relative error {error:.3g}, {allowed:.3g} is allowed")
        self._first, self._chosen = torch.stack(first), torch.stack(chosen)
        self.mismatches = torch.zeros((), dtype=torch.int64, device=device)
        bits = self._first.cpu().view(torch.uint8).numpy().tobytes()
        self.digest = hashlib.sha256(bits).hexdigest()[:16]
        self._turn = self._all_tokens
        if fabric.has_graphs:
            graph = torch.cuda.CUDAGraph()
            fabric.barrier()
            with capturing(graph):
                self._all_tokens()
            self._turn = graph.replay

    def _all_tokens(self) -> None:
        """A step of each token, compared."""
        for token, first, chosen in zip(self._tokens, self._first, self._chosen, strict=True):
            self._given.copy_(token)
            next_token = self._step(self._given, self._positions)
            logits = self._step._kernel.logits
            kind = _BITS[logits.element_size()]
            differs = (logits.view(kind) != first.view(kind)).any() | (next_token != chosen).any()
            self.mismatches += differs

    def run(self, turns: int) -> None:
        """So many turns of all tokens."""
        with torch.no_grad():
            for _ in range(turns):
                self._turn()
        self._fabric.synchronize()
        self._fabric.pool.check_at_rest()


_soaks: dict[str, StepSoak] = {}


def begin(fabric: Fabric, asked: StepToTune, config: dict[str, int], tokens: int) -> dict[str, Any]:
    """Make the steps; a task of the workers."""
    with torch.no_grad():
        soak = _soaks["one"] = StepSoak(fabric, asked, config, tokens)
    return {"digest": soak.digest, "errors": soak.errors}


def go_on(fabric: Fabric, turns: int) -> int:
    """Run turns; the number of steps so far whose result differed."""
    _soaks["one"].run(turns)
    return int(_soaks["one"].mismatches)


def main() -> int:
    """Soak as the command line says."""
    made = parser(__doc__)
    made.add_argument("--gpus", type=positive, default=2)
    made.add_argument("--model", default="llama-3.1-8b")
    made.add_argument("--layers", type=positive)
    made.add_argument("--batch", type=positive, default=1)
    made.add_argument("--context", type=positive, default=1024)
    made.add_argument("--tokens", type=positive, default=8, help="that take turns")
    made.add_argument("--steps", type=positive, default=100_000)
    made.add_argument("--seconds", type=float, default=480.0, help="after which it stops")
    made.add_argument("--config", type=json.loads, default={}, help="of the kernel, as JSON")
    options = made.parse_args()
    return exit_code(lambda: _soak(options))


def _soak(options: Any) -> None:
    begun, fabric = time.monotonic(), devices.fabric_for(options.fabric)
    devices.require(fabric, options.gpus)
    model, dtype = model_to_bench(options.model, options.gpus, options.layers, None)
    asked = StepToTune(model, dtype, options.gpus, options.batch, options.context)
    record: dict[str, Any] = {
        "model": options.model, "problem": asdict(asked.problem), "config": options.config,
        "tokens": options.tokens,
    }  # fmt: skip
    before = {}
    if options.out is not None and options.out.exists():
        before = json.loads(options.out.read_text(encoding="utf-8"))
        if {name: before[name] for name in record} != record:
            raise TaxfreeError(f"{options.out} is of another soak", "give another --out")
    record["steps"] = before.get("steps", 0)
    with group_for([asked.sums], fabric) as group:
        begins = group.call(
            begin, DEADLINE_S, asked=asked, config=options.config, tokens=options.tokens
        )
        record["digests"] = [of_rank["digest"] for of_rank in begins]
        record["relative_error"] = max(max(of_rank["errors"]) for of_rank in begins)
        if before and before["digests"] != record["digests"]:
            raise WrongResult("the first logits have other bits than in the run before")
        turns, record["mismatches"] = 1, 0
        try:
            while record["steps"] < options.steps and time.monotonic() - begun < options.seconds:
                began = time.monotonic()
                left = -(-(options.steps - record["steps"]) // options.tokens)
                turns = min(turns, left)
                differing = group.call(go_on, DEADLINE_S, turns=turns)
                record["steps"] += turns * options.tokens
                record["mismatches"] = sum(differing)
                print(f"{record['steps']:,} steps, {record['mismatches']} mismatches", flush=True)
                if record["mismatches"]:
                    raise WrongResult(f"{differing} steps of the ranks have other bits")
                took = time.monotonic() - began
                turns = max(1, min(4 * turns, int(turns * _ROUND_S / took)))
        finally:
            keep(record, group, fabric, FOLDER, options.out)


if __name__ == "__main__":
    from benchmarks import soak_step  # whose tasks have a module that workers find

    sys.exit(soak_step.main())
