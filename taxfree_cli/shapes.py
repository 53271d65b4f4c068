"""`taxfree shapes`: the named sets, and the problems of a `--shapes` argument."""

from __future__ import annotations

from dataclasses import asdict

from taxfree_cli import options
from taxfree_cli.output import print_json, print_table
from taxfree_cli.record_map import typed
from taxfree_tune.shapes import expand, known_models, left_out, named_sets


def shapes(
    op: options.OpOfShapes = None,
    shapes: options.Shapes = None,
    model: options.Model = None,
    tp: options.Tp = None,
    path: options.Paths = None,
    training: options.Training = False,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    json: options.Json = False,
) -> None:
    """List the named sets and models, or the problems of shapes (on 8 GPUs without --gpus)."""
    shape_options = options.ShapeOptions(op, shapes, gpus, dtype, model, tp, path, training)
    request = shape_options.request(options.MODELLED_GPUS)
    if not (request.shapes or request.model or request.tp):
        _list_sets(op or options.DEFAULT_OP, json)
        return
    problems = {op: expand(op, request) for op in shape_options.operations(request)}
    rows = {
        name: [{"op": name} | asdict(problem) for problem in problems[name]] for name in problems
    }
    if json:
        skipped = [{"op": op, "reason": reason} for op, reason in left_out(request)]
        print_json(
            {"problems": [row for group in rows.values() for row in group], "skipped": skipped}
        )
        return
    for name, group in rows.items():
        print_table(group[0], (row.values() for row in group), narrow=typed(name, problems[name]))
    options.note_left_out(request)


def _list_sets(op: str, json: bool) -> None:
    sets, models = named_sets(op), known_models()
    if json:
        print_json({"op": op, "sets": sets, "models": models})
        return
    rows = [(name, shape) for name, shapes in sets.items() for shape in shapes]
    print_table(["set", "shape"], rows)
    print_table(["model", "repositories"], ((name, ", ".join(models[name])) for name in models))
