"""`taxfree bench`: every variant of a problem beside the library's way and the bounds.

With `--model` alone it is a whole model that is measured (:mod:`taxfree_cli.bench_model`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from taxfree.errors import BelowTarget, UsageError, WorkerLost, WrongResult
from taxfree.files import require_writable
from taxfree.problems import format_problem
from taxfree_cli import options
from taxfree_cli.asked import what_is_asked
from taxfree_cli.bench_views import print_comparison, print_problem
from taxfree_cli.output import print_json, watched
from taxfree_cli.pictures import require_picture
from taxfree_kernels.variant import op_of
from taxfree_tune.measuring import results

Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Hugging Face config.json, or a name such as llama-3.1-70b (`taxfree shapes` lists "
        "them). Alone: its prefill and decode, end to end; with --op or --shapes model, the "
        "problems of its layers.",
    ),
]
Prefill: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--prefill",
        metavar="TOKENS",
        help="Lengths of prompts of a whole model; 256,1024,4096 without this and --decode.",
    ),
]
Decode: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--decode",
        metavar="BATCHES",
        help="Sequences that a whole model decodes; 1,16,64 without this and --prefill.",
    ),
]
OnlyModes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--mode",
        metavar="NAME",
        help="Only this mode of a whole model: eager, compiled, micro-pipeline, graph or step; "
        "repeatable.",
    ),
]
MinSpeedup: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--min-speedup",
        metavar="X",
        help="Fail where dispatch is not X times as fast as the library.",
    ),
]
Compare: TypeAlias = Annotated[
    Path | None,
    typer.Option("--compare", metavar="FILE", help="Compare rows with an earlier --out."),
]
Out: TypeAlias = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Also write the results as JSON.")
]
Plot: TypeAlias = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Draw time / bound against the size."),
]


def bench(
    op: options.OpOfShapes = None,
    shapes: options.Shapes = None,
    model: Model = None,
    layers: options.Layers = None,
    prefill: Prefill = None,
    decode: Decode = None,
    context: options.Context = None,
    mode: OnlyModes = None,
    tp: options.Tp = None,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    fabric: options.Fabric = "auto",
    variant: options.OnlyVariants = None,
    db: options.Db = None,
    min_speedup: MinSpeedup = None,
    compare: Compare = None,
    out: Out = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """Measure all variants, the library path and dispatch against the hardware bounds.

    With --model alone: tokens per second of the model, by PyTorch's tensor parallelism and by
    taxfree, with random weights.

    Under torchrun, srun or Kubernetes, the launcher's processes on the first node are the ranks.
    """
    from taxfree_cli.bench_model import ModelOptions, bench_model

    shape_options = options.ShapeOptions(op, shapes, gpus, dtype, model, tp)
    of_model = ModelOptions(layers, prefill, decode, context, mode)
    is_whole_model = model is not None and op is None and not shapes
    of_problems = {
        "--tp": tp, "--variant": variant, "--min-speedup": min_speedup, "--compare": compare,
        "--plot": plot,
    }  # fmt: skip
    if is_whole_model:
        why = "is not for a whole model, which --model alone measures"
        options.refuse(of_problems, why, "add --shapes model for the problems of its layers")
    else:
        of_whole = {f"--{name}": value for name, value in vars(of_model).items()}
        hint = "give --model, and neither --op nor --shapes"
        options.refuse(of_whole, "is for a whole model", hint)
    if plot is not None:
        require_picture(plot)
    if min_speedup is not None and not 0 < min_speedup < math.inf:
        raise UsageError(
            f"--min-speedup {min_speedup} is not a positive number", "for example --min-speedup 1.1"
        )
    if out is not None:
        require_writable(out)
        if plot is not None and os.path.realpath(out) == os.path.realpath(plot):
            raise UsageError("--out and --plot name one file", "give each its own")
    if model is not None and is_whole_model:
        bench_model(model, shape_options, of_model, fabric, db, out, json)
        return
    before = None if compare is None else results.load(compare).rows
    from taxfree.fingerprints import size_field
    from taxfree_tune.benching.bench import collect, run

    asked = what_is_asked(shape_options, fabric, db, variant or None)
    ops = {op_of(problem) for problem in asked.problems}
    if plot is not None and len(ops) > 1:
        raise UsageError("--plot draws one operation, the shapes are of several", "add --op")
    measured = []
    try:
        for result in watched(
            "bench",
            len(asked.problems),
            run(asked.problems, asked.fabric, asked.history, asked.only),
        ):
            measured.append(result)
            if not json:
                print_problem(result)
    finally:  # what is finished is kept, also where the rest is not
        if measured:
            collected = collect(asked.fabric, measured)
            if out is not None:
                results.save(collected, out)
    verdicts = None if before is None else results.compare(collected.rows, before)
    if json:
        document = collected.to_json()
        if verdicts is not None:
            document["comparison"] = [verdict.to_json() for verdict in verdicts]
        print_json(document)
    elif verdicts is not None and compare is not None:
        print_comparison(verdicts, compare)
    if plot is not None and collected.rows:
        from taxfree_tune.reporting.pictures import save_times

        save_times(collected.rows, size_field(ops.pop()), plot)
    fail_if_broken(collected.skipped)
    if min_speedup is not None:
        _fail_if_below(collected.rows, min_speedup)


def fail_if_broken(skipped: Sequence[results.Skipped]) -> None:
    """Stop with the exit code for wrong or hanging variants if there are any.

    Raises:
        WrongResult: naming the first that is wrong.
        WorkerLost: naming the first that hangs.
    """
    for state, verb, error in (("wrong", "is wrong", WrongResult), ("hung", "hangs", WorkerLost)):
        broken = [skip for skip in skipped if skip.state == state]
        if broken:
            first = broken[0]
            raise error(
                f"{first.variant} {verb} on {format_problem(first.op, first.problem)}: "
                f"{first.reason}",
                f"{len(broken)} in all; they were not timed",
            )


def _fail_if_below(rows: Sequence[results.Row], least: float) -> None:
    slow = results.below(rows, least)
    if slow:
        named = "; ".join(f"{format_problem(r.op, r.problem)}: {r.speedup or 0:.2f}x" for r in slow)
        raise BelowTarget(
            f"dispatch is less than {least:g}x as fast as the library: {named}",
            "tune these shapes with more --trials",
        )
