"""A process that compiles what it is asked for, line by line of JSON; see :mod:`.pool`.

It is started without TRITON_INTERPRET, and never asks for a device.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taxfree_check.cross_compile.compiled_kernel import CompiledKernel


def main() -> None:
    """Answer requests from stdin until it ends; compilers' own output goes to stderr."""
    os.nice(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except Exception as error:  # whatever the compiler raises is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.flush()
        print(json.dumps(answer), file=answers, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from taxfree_check.cross_compile.compile import compile_launch
    from taxfree_check.cross_compile.instructions import digests
    from taxfree_check.cross_compile.record import record
    from taxfree_kernels.hardware import Hardware
    from taxfree_kernels.variant import problem_class

    if not request:
        return {}  # it was only to be started
    hardware = Hardware(**request["hardware"])
    problem = problem_class(request["op"])(**request["problem"])
    launches = record(
        request["op"], request["variant"], problem, request["config"], hardware,
        request["heap_bytes"],
    )  # fmt: skip
    if "assembly" in request:
        return digests(launches, hardware, request["assembly"])
    compiled = [compile_launch(launch, hardware, request["to_run"]) for launch in launches]
    return {
        "kernels": [
            {
                "kernel": kernel.name,
                "resources": asdict(kernel.resources),
                "violations": checked(replace(kernel, begins_call=index == 0), request["aligned"]),
            }
            for index, kernel in enumerate(compiled)
        ]
    }


def checked(kernel: CompiledKernel, aligned: bool | None) -> list[dict[str, Any]]:
    """Violations of the assembly checks; None for `aligned` leaves those of speed out."""
    from taxfree_check.cross_compile.asm_checks import violations
    from taxfree_check.cross_compile.compile import matrix_remarks

    if aligned is not None:
        kernel = replace(kernel, aligned=aligned, matrix_remarks=matrix_remarks(kernel.text))
    return [asdict(violation) for violation in violations(kernel, speed=aligned is not None)]


if __name__ == "__main__":
    main()
