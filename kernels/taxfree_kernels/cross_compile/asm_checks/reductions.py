"""Reductions across warps: what some compilers get wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from taxfree_kernels.cross_compile.asm_checks.rules import Finding, gate
from taxfree_kernels.cross_compile.asm_checks.subject import Subject

#: in Triton's IR for GPUs: a linear layout and its steps from warp to warp; a reduction
_LINEAR = re.compile(r"^(#\w+) = #ttg\.linear<\{.*?warp = (\[.*\]), block", re.MULTILINE)
_STEP = re.compile(r"\[([\d, ]+)\]")
_REDUCTION = re.compile(
    r'"tt\.reduce"\([^\n]*?<\{axis = (\d+) : i32\}> \(\{.*?\n *\}\) : \(tensor<[^\n]*?, (#\w+)>',
    re.DOTALL,
)


@gate
def warps_of_reductions(subject: Subject) -> Iterator[Finding]:
    """No reduction across warps has a layout that interleaves warps along its axis and others.

    Some compilers number such warps wrongly, so that two of them store to the same location.
    """
    layouts = dict(_LINEAR.findall(subject.ttgir))
    for body in _REDUCTION.finditer(subject.ttgir):
        axis, layout = int(body.group(1)), body.group(2)
        steps = [step.split(",") for step in _STEP.findall(layouts.get(layout, ""))]
        dims = [next((at for at, each in enumerate(step) if int(each)), -1) for step in steps]
        if axis in dims and len([*groupby(dims)]) > len(set(dims)):
            yield Finding(f"along axis {axis} with warps {layouts[layout]}")
