"""`taxfree shapes`: the named sets, and the problems of a `--shapes` argument."""

from __future__ import annotations

from dataclasses import asdict

from taxfree.shapes import expand, named_sets
from taxfree_cli import options
from taxfree_cli.output import print_json, print_table


def shapes(
    op: options.OpOfShapes = None,
    shapes: options.Shapes = None,
    model: options.Model = None,
    tp: options.Tp = None,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    json: options.Json = False,
) -> None:
    """List the named sets, or the problems of shapes (on 8 GPUs without --gpus)."""
    given = options.ShapeOptions(op, shapes, gpus, dtype, model, tp)
    request = given.request(options.MODELLED_GPUS)
    if not (request.shapes or request.model or request.tp):
        _list_sets(op or options.DEFAULT_OP, json)
        return
    found = {each: expand(each, request) for each in given.operations()}
    rows = {name: [{"op": name} | asdict(each) for each in found[name]] for name in found}
    if json:
        print_json({"problems": [row for own in rows.values() for row in own]})
        return
    for own in rows.values():
        print_table(own[0], (row.values() for row in own))


def _list_sets(op: str, json: bool) -> None:
    sets = named_sets(op)
    if json:
        print_json({"op": op, "sets": sets})
        return
    rows = [(name, shape) for name, shapes in sets.items() for shape in shapes]
    print_table(["set", "shape"], rows)
