"""What rank workers need for tests of the run-time dispatcher: problems, records, runtimes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

import taxfree._runtime.ops  # noqa: F401  registers the torch ops
from taxfree import fingerprints
from taxfree._runtime.runtime import Runtime
from taxfree_kernels.variant import op_of, operation, problem_class, variants
from taxfree_tuning_db import Measurement, Record

OP = "all_gather_matmul"
M, N, K = 5, 32, 36
DECODE = {"batch": 2, "q_heads": 3, "kv_heads": 1, "head_dim": 16, "kv_len_per_rank": 20}
PROMPTS = {"batch": 2, "length": 20, "q_heads": 2, "kv_heads": 1, "head_dim": 16}
BAGS = {"batch": 2, "bag": 2, "tables": 3, "rows": 5, "dim": 6}
DOMAIN = {"rows": 12, "columns": 10, "steps": 4}
FIELDS = {"flash_decode": DECODE, "attention": PROMPTS, "embedding_all_to_all": BAGS}
FIELDS |= {"stencil": DOMAIN}


def problem_of(op: str = OP, **changes: Any) -> Any:
    """The same problem each time, but for `changes`, on all ranks."""
    fields = FIELDS.get(op, {"m": M, "n": N, "k": K})
    return problem_class(op)(**fields | {"world_size": dist.get_world_size()} | changes)


def tensors_of(fabric: Any, problem: Any, seed: int = 1) -> tuple[Any, torch.Tensor]:
    """This rank's tensors of integers, and the result."""
    found = operation(op_of(problem))
    inputs = found.make_inputs(problem, fabric.rank, seed, fabric.device, integers=True)
    reference = found.reference(problem, fabric.rank, seed, fabric.device, integers=True)
    is_quantised = getattr(problem, "out_scales", "none") != "none"  # to be dequantised exactly
    return inputs, reference if is_quantised else reference.to(getattr(torch, problem.dtype))


def record_of(fabric: Any, problem: Any, variant: str = "push") -> Record:
    """A record that a variant with its default config has won."""
    op = op_of(problem)

    def measured(name: str, config: dict[str, Any], us: float) -> Measurement:
        version = fingerprints.versions(op)[name]
        return Measurement(name, config, version, {"eager": us}, {"eager": 0.0}, 1, None)

    config = variants(op)[variant].seed_configs(problem, fabric.hardware)[0]
    return Record(
        op=op, problem=dataclasses.asdict(problem),
        hardware=fingerprints.hardware_fingerprint(fabric.hardware),
        software=fingerprints.software_fingerprint(),
        winner=measured(variant, config, 1.0), baseline=measured("baseline", {}, 2.0),
        runners_up=(), trials=1, seconds_spent=0.0, provenance={"source": "user"},
    )  # fmt: skip


def runtime_of(fabric: Any, *records: Record) -> Runtime:
    """A runtime that has these records alone."""
    return Runtime.on_fabric(fabric, records)
