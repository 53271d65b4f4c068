"""`taxfree explain`: what a problem costs as the library runs it, and as the dispatcher does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from taxfree.shapes import written
from taxfree_cli import options
from taxfree_cli.bench import OnlyVariants, fail_if_broken, measuring, what_is_asked
from taxfree_cli.bench_views import us
from taxfree_cli.output import print_json, rank, results
from taxfree_cli.record_views import words

if TYPE_CHECKING:
    from taxfree.explain import Explanation, Pipeline


def explain(
    op: options.Op = options.DEFAULT_OP,
    shapes: options.Shapes = None,
    model: options.Model = None,
    tp: options.Tp = None,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    fabric: options.Fabric = "auto",
    variant: OnlyVariants = None,
    db: options.Db = None,
    json: options.Json = False,
) -> None:
    """Show times, launches and bounds of the baseline and of what dispatch picks, and why."""
    if rank() != 0:  # under torchrun: the first rank starts the workers, on its node
        return
    from taxfree.bench import collect
    from taxfree.explain import explain as arrange

    asked = what_is_asked(op, shapes, model, tp, gpus, dtype, fabric, db, variant or ())
    measured = []
    for result in measuring(asked):
        measured.append(result)
        if not json:
            results().print(tree(arrange(result)))
    if json:
        explained = [arrange(result) for result in measured]
        print_json(
            {
                "schema": 1,
                "environment": collect(asked.fabric, measured).environment,
                "rows": [row for each in explained for row in each.rows()],
                "dispatch": [each.dispatch_json() for each in explained],
                "unmeasured": explained[0].unmeasured,
            }
        )
    fail_if_broken([each for result in measured for each in result.skipped])


def tree(explanation: Explanation) -> Tree:
    """One problem as a tree of short lines."""
    root = Tree(Text(f"{explanation.op} {written(explanation.op, explanation.problem)}"))
    bounds = explanation.bounds
    limits = root.add("bounds")
    limits.add(_line("t_bound", bounds.t_bound_us, "the longer of floor and link"))
    limits.add(_line("t_floor", bounds.t_floor_us, "flops and memory at measured rates"))
    limits.add(_line("t_link", bounds.t_link_us, "bytes to receive at the measured rate"))
    limits.add(_line("t_gemm", bounds.t_gemm_us, "the vendor's kernel alone"))
    for pipeline in explanation.pipelines:
        _add_pipeline(root, explanation, pipeline)
    for each in explanation.skipped:
        root.add(Text(f"{each.variant}: {each.state}: {each.reason}"))
    choice = explanation.choice
    why = root.add(Text(f"dispatch picks {choice.variant} ({choice.kind}): {choice.why}"))
    for rung in explanation.ladder:
        why.add(Text(f"{'+' if rung.found else '-'} {rung.looked_for}: {rung.why}"))
    return root


def _add_pipeline(root: Tree, explanation: Explanation, pipeline: Pipeline) -> None:
    name = f"{pipeline.variant} {words(pipeline.config)}".rstrip()
    branch = root.add(Text(f"dispatch: {name}" if pipeline.is_dispatched else name))
    bound = explanation.bounds.t_bound_us
    for label, time in (("t_eager", pipeline.t_eager_us), ("t_graph", pipeline.t_graph_us)):
        reason = explanation.unmeasured.get(f"{label}_us", "")
        branch.add(_line(label, time, reason if time is None else f"{time / bound:.2f} x bound"))
    branch.add(Text(f"launches {pipeline.launches}"))


def _line(label: str, time_us: float | None, remark: str) -> Text:
    time = "-" if time_us is None else f"{us(time_us)} us"
    return Text.assemble(f"{label:<8} {time:>10}", (f"  {remark}", "dim"))
