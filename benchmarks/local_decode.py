"""Times our attention on one GPU beside torch's and FlashInfer's, on the same inputs.

    python -m benchmarks.local_decode --shapes paper --shapes batches
    python -m benchmarks.local_decode --op attention --shapes paper

All implementations run interleaved in one worker, over rotated inputs that together exceed L2.
Ours are `baseline`, untuned, and the others that one rank can run, at each of their seed configs;
for prompts, at the first. Planning on the host is not timed. The script prints a table, and writes
the result file, with every sample, under ``benchmarks/results/<operation>``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.commands import exit_code, parser
from taxfree import fingerprints
from taxfree.errors import TaxfreeError, one_line
from taxfree.shapes import ShapeRequest, expand
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import variants
from taxfree_tune import devices
from taxfree_tune.measuring import environment, timer
from taxfree_tune.measuring.bounds import Bounds, Peaks, bounds, peaks
from taxfree_tune.measuring.groups import deadline_s, group_for
from taxfree_tune.measuring.results import Results, Row, Skipped, machine_name, save
from taxfree_tune.measuring.trial import Bench, Calls, Candidate, open_bench

FOLDER = Path(__file__).parent / "results"
OP, PROMPTS = "flash_decode", "attention"
PAGE = 16  # of a dense cache as FlashInfer sees it
_WORKSPACE_BYTES = 128 << 20
_REPETITIONS = {True: 25, False: 3}  # with, and without graphs
#: seed configs of each variant; heads are constants, so those of prompts compile for each problem
_SEEDS = {OP: None, PROMPTS: 1}
_FLOPS = 2e14  # of all repetitions of a mode: long prompts are repeated less often

#: one call on the i-th set of inputs; returns [batch, q_heads, v_head_dim], perhaps with ones
Attend = Callable[[int], torch.Tensor]


@dataclass
class Implementation:
    """The measurement of one implementation.

    Args:
        name: "baseline", "splits" or a peer's.
        config: of ours.
        relative_error: against float64.
        timings: by mode; empty if it was not timed.
        reason: why it was not.
    """

    name: str
    config: dict[str, Any]
    relative_error: float | None = None
    timings: dict[str, timer.Timing] = dataclasses.field(default_factory=dict)
    reason: str = ""


# -- in the worker -------------------------------------------------------------------------------


def measure_problem(
    fabric: Fabric, op: str, problem: dict[str, Any]
) -> tuple[list[Implementation], Bounds, Peaks]:
    """Check, then time, all implementations of a problem together; a task of the worker."""
    bench = open_bench(fabric, op, problem)
    outcomes = [
        *(
            Implementation(name, config)
            for name, variant in variants(op).items()
            if variant.unsupported_reason(bench.problem, fabric.hardware) is None
            for config in variant.seed_configs(bench.problem, fabric.hardware)[: _SEEDS[op]]
        ),
        *(Implementation(name, {}) for name in PEERS[op]),
    ]
    tried = [(each, _right(bench, each)) for each in outcomes]
    # A prompt takes so long that its launch does not show.
    modes = ("eager", "graph") if fabric.has_graphs and op == OP else ("eager",)
    timed = [(each, attend, mode) for each, attend in tried if attend for mode in modes]
    calls = [(attend, mode) for _, attend, mode in timed]
    repetitions, chain = _repetitions(fabric, bench.problem)
    timings = timer.time_together(fabric, calls, repetitions, chain=chain)
    for (each, _, mode), timing in zip(timed, timings, strict=True):
        each.timings[mode] = timing
    rates = peaks(fabric, bench.problem.dtype)
    return outcomes, bounds(bench.problem.cost, rates, None), rates


def _repetitions(fabric: Fabric, problem: Any) -> tuple[int, int]:
    """Repetitions, and calls of each: fewer of long prompts."""
    calls = max(3, int(_FLOPS / problem.cost.flops))
    most = _REPETITIONS[fabric.has_graphs]
    chain = max(1, min(timer.chain_of(fabric), calls // most))
    return min(most, calls // chain), chain


def _right(bench: Bench, outcome: Implementation) -> Attend | None:
    """An implementation whose result is that of the reference; else None, and the reason."""
    try:
        make = PEERS[bench.op].get(outcome.name)
        attend = make(bench) if make else _ours(bench, Candidate(outcome.name, outcome.config))
        out = attend(0)
    except Exception as error:  # whatever a library raises is a reason to do without it
        outcome.reason = one_line(error)
        return None
    outcome.relative_error = bench.error_of(out.reshape(bench.outputs[0].shape))
    if outcome.relative_error <= 0.01:
        return attend
    outcome.reason = f"relative error {outcome.relative_error:.2e}"
    return None


def _ours(bench: Bench, candidate: Candidate) -> Attend:
    call = bench.call(bench.plan(candidate))

    def attend(step: int) -> torch.Tensor:
        call(step)
        return bench.outputs[step % len(bench.inputs)]

    return attend


def _torch(bench: Calls, backend: SDPBackend | None) -> Attend:
    """torch's attention, with the backend that it picks if none is given."""
    _require_plain(bench.problem, "scaled_dot_product_attention")
    is_causal = getattr(bench.problem, "causal", False)

    def attend(step: int) -> torch.Tensor:
        q, k, v = _of_torch(bench, step)
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


def _flex(bench: Calls) -> Attend:
    """torch's FlexAttention, compiled where there is a GPU."""
    _require_plain(bench.problem, "flex_attention")
    compiled = torch.compile(flex_attention, dynamic=False)
    function = compiled if bench.fabric.has_graphs else flex_attention

    def attend(step: int) -> torch.Tensor:
        out = function(*_of_torch(bench, step), enable_gqa=True)
        assert isinstance(out, torch.Tensor)
        return out

    return attend


def _of_torch(bench: Calls, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values of a set of inputs, as [batch, heads, tokens, .]."""
    q, k, v, *_ = bench.inputs[step % len(bench.inputs)]
    assert q is not None
    assert k is not None
    assert v is not None
    if bench.op == PROMPTS:
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2)


def flashinfer_decode(bench: Calls, library: Any) -> Attend:
    """FlashInfer's decode of a paged cache; a dense one is seen as pages of 16 keys.

    Args:
        library: the module ``flashinfer``.
    """
    problem, device = bench.problem, bench.fabric.device
    if problem.soft_cap or problem.window or problem.head_dim != problem.v_head_dim:
        raise TaxfreeError("not tried with a soft cap, a window or another v_head_dim")
    page = problem.page_size or PAGE
    if problem.kv_len_per_rank % page:
        raise TaxfreeError(f"{problem.kv_len_per_rank} keys are not a multiple of {page}")
    pages = problem.kv_len_per_rank // page
    per_sequence = torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * pages
    full = torch.full((problem.batch,), page, dtype=torch.int32, device=device)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    calls = []
    for (q, k, v, _, table, _), out in zip(bench.inputs, bench.outputs, strict=True):
        assert k is not None
        assert v is not None
        if table is None:
            k, v = (each.view(-1, page, *each.shape[2:]) for each in (k, v))
            table = torch.arange(problem.batch * pages, dtype=torch.int32, device=device)
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="NHD", use_tensor_cores=problem.group_size > 1
        )
        wrapper.plan(
            per_sequence, table.flatten(), full, problem.q_heads, problem.kv_heads,
            problem.head_dim, page, q_data_type=k.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        calls.append(functools.partial(wrapper.run, q, (k, v), out=out))
    return lambda step: calls[step % len(calls)]()


def _flashinfer(bench: Calls) -> Attend:
    return flashinfer_decode(bench, importlib.import_module("flashinfer"))


def _require_plain(problem: Any, name: str) -> None:
    if any(getattr(problem, each, False) for each in ("page_size", "soft_cap", "window", "packed")):
        raise TaxfreeError(f"{name} is called without pages, soft cap, window and packed sequences")


_TORCH: Mapping[str, Callable[[Calls], Attend]] = {
    "torch_sdpa": functools.partial(_torch, backend=None),
    "torch_flash": functools.partial(_torch, backend=SDPBackend.FLASH_ATTENTION),
    "torch_cudnn": functools.partial(_torch, backend=SDPBackend.CUDNN_ATTENTION),
}
#: operation -> name -> maker of another implementation; its error says why there is none
PEERS: Mapping[str, Mapping[str, Callable[[Calls], Attend]]] = {
    OP: {**_TORCH, "torch_flex": _flex, "flashinfer": _flashinfer},
    PROMPTS: _TORCH,
}


# -- in the controller ---------------------------------------------------------------------------


def run(fabric: str, problems: Sequence[Any], op: str = OP) -> Iterator[Results]:
    """Measure problems of one rank each, and print a line for each implementation.

    Yields:
        After each problem, the results so far.

    Raises:
        TaskFailed: the fabric cannot be opened, or measuring failed.
    """
    from benchmarks.local_decode import measure_problem  # this may be __main__, which ranks lack

    rows: list[Row] = []
    skipped: list[Skipped] = []
    with group_for(problems, fabric) as group:
        machine = environment.record(fabric, group.hardware)
        for problem in problems:
            fields = dataclasses.asdict(problem)
            answer = group.call(measure_problem, deadline_s(group.hardware), op=op, problem=fields)[
                0
            ]
            outcomes, limits, rates = answer
            found = [row for each in outcomes for row in _rows(op, problem, each, limits)]
            skipped += [
                Skipped(op, fields, each.name, each.config, "failed", each.reason)
                for each in outcomes
                if each.reason
            ]
            rows += found
            _print(problem, found, rates)
            peak = dataclasses.asdict(rates) | {"link_bytes_per_s": None, "world_size": 1}
            yield Results(machine | {"peaks": [peak]}, tuple(rows), tuple(skipped))


def _rows(op: str, problem: Any, outcome: Implementation, limits: Bounds) -> list[Row]:
    cost, is_ours = problem.cost, outcome.name in variants(op)
    return [
        Row(
            op=op,
            problem=dataclasses.asdict(problem),
            variant=outcome.name,
            config=outcome.config,
            mode=mode,  # type: ignore[arg-type]
            median_us=timing.median_us,
            iqr_us=timing.iqr_us,
            samples_us=timing.samples_us,
            t_floor_us=limits.t_floor_us,
            t_gemm_us=None,
            t_link_us=limits.t_link_us,
            t_bound_us=limits.t_bound_us,
            relative_error=outcome.relative_error,
            version=fingerprints.versions(op)[outcome.name] if is_ours else None,
            tflops=cost.flops / timing.median_us * 1e-6,
            gbps=cost.memory_bytes / timing.median_us * 1e-3,
        )
        for mode, timing in outcome.timings.items()
    ]


def _print(problem: Any, rows: Sequence[Row], rates: Peaks) -> None:
    copy = rates.memory_bytes_per_s * 1e-9
    print(f"{problem}: copy {copy:,.0f} GB/s")
    for row in sorted(rows, key=lambda each: each.median_us):
        share = row.gbps / copy
        config = " ".join(f"{name}={value}" for name, value in row.config.items())
        print(
            f"  {row.median_us:9.1f} us {row.mode:5} {share:6.1%} of copy  {row.variant} {config}",
            flush=True,
        )


def main() -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--op", choices=sorted(PEERS), default=OP, help="the operation")
    made.add_argument("--shapes", action="append", help="as for taxfree bench; paper by default")
    options = made.parse_args()
    return exit_code(lambda: _compare(options))


def _compare(options: argparse.Namespace) -> None:
    fabric = devices.fabric_for(options.fabric)
    shapes = options.shapes or [devices.default_shapes(fabric)]
    problems = expand(options.op, ShapeRequest(shapes, world_sizes=(1,)))
    for results in run(fabric, problems, options.op):
        if options.out or fabric != "host":
            gpu = machine_name(results.environment["hardware"]["gpu"])
            save(results, options.out or FOLDER / options.op / f"local-{gpu}.json")


if __name__ == "__main__":
    sys.exit(main())
