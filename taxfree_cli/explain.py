"""`taxfree explain`: where the time of a problem goes, in the library's way and in variants."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from taxfree.errors import NoRecord, TaxfreeError, UsageError
from taxfree.files import require_writable, write
from taxfree.problems import format_problem
from taxfree_cli import options
from taxfree_cli.asked import Asked, what_is_asked
from taxfree_cli.bench import fail_if_broken
from taxfree_cli.bench_views import us
from taxfree_cli.explain_scale import explain_scale
from taxfree_cli.explain_views import print_explanation, print_sweep, print_timelines
from taxfree_cli.output import note, print_json, print_lines, watched
from taxfree_cli.pictures import require_picture
from taxfree_cli.tune_step import explain_step, is_for_step
from taxfree_tune.shapes import choose

if TYPE_CHECKING:
    from taxfree_tune.benching.bench import ProblemResult
    from taxfree_tune.profiling.explain import Explanation

HardwareName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help="Model this GPU instead of measuring: h200, mi300x or mi325x.",
    ),
]
Sweep: TypeAlias = Annotated[
    bool, typer.Option("--sweep", help="One row per shape and variant instead of all parts.")
]
Plot: TypeAlias = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Draw the taxes as stacked bars."),
]
TraceFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE.json",
        help="Write a Perfetto trace of ranks and programs; needs a single shape.",
    ),
]
TimelineFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--timeline", metavar="FILE.png", help="Draw what --trace writes."),
]
Scale: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--scale",
        metavar="RANKS..RANKS",
        help="Model the recorded problems on more ranks, such as 2..64, doubling: bytes, signals, "
        "skew and launches; measures nothing.",
    ),
]
BetweenNodes: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="GB/s,us",
        help="With --scale: ranks beyond the largest record are on other nodes, over such a link "
        "of each rank, one way.",
    ),
]
SavedFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE.json",
        help="Show what --json or --trace saved, here or elsewhere; measure nothing.",
    ),
]


def explain(
    op: options.OpOfShapes = None,
    shapes: options.Shapes = None,
    model: options.Model = None,
    tp: options.Tp = None,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    fabric: options.FabricIfMeasured = None,
    hardware: HardwareName = None,
    variant: options.OnlyVariants = None,
    db: options.Db = None,
    sweep: Sweep = False,
    plot: Plot = None,
    trace: TraceFile = None,
    timeline: TimelineFile = None,
    saved: SavedFile = None,
    scale: Scale = None,
    link: BetweenNodes = None,
    layers: options.Layers = None,
    batch: options.Batch = None,
    context: options.Context = None,
    json: options.Json = False,
) -> None:
    """Show the three taxes of the library path and the dispatched variant, part by part.

    With --op decode_step and --model: what the time of a step in one kernel is.
    """
    of_problems = {"--hardware": hardware, "--variant": variant, "--sweep": sweep,
                   "--plot": plot, "--trace": trace, "--timeline": timeline,
                   "--from": saved, "--scale": scale, "--tp": tp}  # fmt: skip
    of_step = {"--layers": layers, "--batch": batch, "--context": context}
    if is_for_step(op, of_problems, of_step):
        step = options.ShapeOptions(op, shapes, gpus, dtype, model)
        explain_step(step, layers, batch or 1, context or 1024, fabric or "auto", db, json)
        return
    if scale is not None:
        measuring = {"--fabric": fabric, "--hardware": hardware, "--variant": variant,
                     "--sweep": sweep, "--trace": trace, "--timeline": timeline, "--from": saved,
                     "--model": model, "--tp": tp}  # fmt: skip
        options.refuse(
            measuring, "is not for --scale", "it models what records say, and measures nothing"
        )
        asked_of = options.ShapeOptions(op, shapes, gpus, dtype)
        explain_scale(asked_of, scale, link, db, plot, json)
        return
    options.refuse({"--link": link}, "is the link between nodes of --scale", "add --scale 2..64")
    if plot is not None:
        require_picture(plot)
    if timeline is not None:
        require_picture(timeline, "--timeline")
    if trace is not None:
        require_writable(trace)
    shape_options = options.ShapeOptions(op, shapes, gpus, dtype, model, tp)
    if saved is not None:
        if any(
            option not in (None, [], False)
            for option in (fabric, hardware, variant, db, trace, timeline, plot, json, model, tp)
        ):
            raise UsageError(
                "--from takes only --op, --shapes, --gpus, --dtype and --sweep",
                "it shows what was measured",
            )
        _show_saved(saved, shape_options, sweep)
        return
    wants_timelines = trace is not None or timeline is not None
    if hardware is not None:
        if wants_timelines:
            raise UsageError("timelines need a measurement", "leave --hardware out")
        if fabric is not None or db is not None:
            raise UsageError(
                "--hardware takes neither --fabric nor --db",
                "a model measures and dispatches nothing",
            )
        explanations, environment = _modelled(shape_options, hardware, variant or ())
    else:
        asked = what_is_asked(shape_options, fabric or "auto", db, variant or ())
        if wants_timelines and len(asked.problems) > 1:
            raise UsageError(
                f"--trace and --timeline are of one shape, not {len(asked.problems)}",
                "name one with --shapes",
            )
        explanations, environment = _measured(asked)
    explained: list[Explanation] = []
    try:
        for explanation in explanations:
            explained.append(explanation)
            if not (sweep or json):
                print_explanation(explanation)
    finally:  # what is finished is shown, also where the rest is not
        if explained:
            if json:
                _print_json(explained, environment())
            elif sweep:
                print_sweep(explained)
            if plot is not None:
                from taxfree_tune.reporting.pictures import save_taxes

                save_taxes([row for explanation in explained for row in explanation.rows()], plot)
    if wants_timelines:
        _write_timelines(explained[0], environment, trace, timeline)
    fail_if_broken([skipped for explanation in explained for skipped in explanation.skipped])
    _fail_below_bound(explained)


def _show_saved(path: Path, shape_options: options.ShapeOptions, is_sweep: bool) -> None:
    """Print what a file holds of the problems that are asked for, or all of it.

    Raises:
        UsageError: it is no such file.
        NoRecord: it holds none of the problems.
    """
    from taxfree_tune.profiling.saved import load

    saved = load(path)
    is_asked = shape_options.picks()
    explanations = [
        explanation
        for explanation in saved.explanations
        if is_asked(explanation.op, explanation.problem)
    ]
    timelines = [
        timeline for timeline in saved.timelines if is_asked(timeline.op, timeline.problem)
    ]
    if not (explanations or timelines):
        raise NoRecord(
            f"{path} holds none of these problems", "`taxfree explain --from` alone shows them all"
        )
    first = explanations[0] if explanations else timelines[0]
    machine = f"{first.problem['world_size']} x {first.hardware}"
    said = "modelled for" if explanations and explanations[0].is_modelled else "measured on"
    print_lines([f"{path.name}: {said} {machine}, {saved.created[:10]}; not measured here", ""])
    if explanations and is_sweep:
        print_sweep(explanations)
    elif explanations:
        for explanation in explanations:
            print_explanation(explanation)
    for timeline in timelines:
        print_timelines(timeline)


def _modelled(
    shape_options: options.ShapeOptions, hardware: str, only: Sequence[str]
) -> tuple[Iterator[Explanation], Callable[[], dict[str, Any]]]:
    """Explanations by the cost model, and what gives the environment that they are of."""
    from taxfree import fingerprints
    from taxfree_tune import cost_model
    from taxfree_tune.profiling.explain import model

    request = shape_options.request(options.MODELLED_GPUS)
    problems = {
        op: choose(op, request, lambda: ()).problems
        for op in shape_options.operations(request, only)
    }
    machine = cost_model.machine(hardware)
    note("modelled: nothing was measured; docs/cost-model.md says how, and how wrong it is on H200")
    fingerprint = asdict(fingerprints.hardware_fingerprint(machine.hardware))
    return (
        (model(op, problem, machine, only) for op, group in problems.items() for problem in group),
        lambda: {"hardware": fingerprint, "modelled": True},
    )


def _measured(
    asked: Asked,
) -> tuple[Iterator[Explanation], Callable[[], dict[str, Any]]]:
    """Explanations as they are measured, and what gives the environment of those so far."""
    from taxfree_tune.benching.bench import collect
    from taxfree_tune.profiling.explain import run

    measured: list[ProblemResult] = []

    def explanations() -> Iterator[Explanation]:
        results = run(asked.problems, asked.fabric, asked.history, asked.only or ())
        for result, explanation in watched("explain", len(asked.problems), results):
            measured.append(result)
            yield explanation

    return explanations(), lambda: collect(asked.fabric, measured).environment


def _print_json(explained: Sequence[Explanation], environment: dict[str, Any]) -> None:
    from taxfree_tune.profiling.explain import SCHEMA

    dispatch = [explanation.dispatch_json() for explanation in explained]
    print_json(
        {
            "schema": SCHEMA,
            "environment": environment,
            "rows": [row for explanation in explained for row in explanation.rows()],
            "skipped": [
                asdict(skipped) for explanation in explained for skipped in explanation.skipped
            ],
            "dispatch": [choice for choice in dispatch if choice is not None],
        }
    )


def _write_timelines(
    explanation: Explanation,
    environment: Callable[[], dict[str, Any]],
    trace_path: Path | None,
    picture: Path | None,
) -> None:
    from taxfree_tune.profiling.timeline import chrome_trace, timelines

    drawn = timelines(explanation)
    call = {
        "op": explanation.op,
        "problem": explanation.problem,
        "hardware": explanation.hardware,
        "timelines": [timeline.to_json() for timeline in drawn],
    }
    if trace_path is not None:
        # Trace viewers pass over what `taxfree report` reads.
        document = chrome_trace(drawn) | {"environment": environment(), "pictures": [call]}
        write(trace_path, json_module.dumps(document))
    if picture is not None:
        from taxfree_tune.reporting.pictures import save_timelines

        save_timelines(call, picture)


def _fail_below_bound(explained: Sequence[Explanation]) -> None:
    """Stop where something is faster than is possible.

    Raises:
        TaxfreeError: naming the first.
    """
    for explanation in explained:
        for pipeline in explanation.pipelines:
            account = pipeline.slowest
            # without graphs kernels are interpreted, and the bound is that of other work
            if account.t_graph_us is not None and account.is_below_bound() and pipeline.timed:
                raise TaxfreeError(
                    f"{pipeline.variant} on {format_problem(explanation.op, explanation.problem)} "
                    f"is faster than its bound of {us(account.t_bound_us)} us",
                    "the bound's rates or the time are wrong: was another program on the GPUs?",
                )
