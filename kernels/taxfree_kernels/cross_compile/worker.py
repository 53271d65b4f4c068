"""A process that compiles what it is asked for, line by line of JSON; see :mod:`.pool`.

It is started without TRITON_INTERPRET, and never asks for a device.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any


def main() -> None:
    """Answer requests from stdin until it ends; compilers' own output goes to stderr."""
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
    from taxfree_kernels.cross_compile.compile import compile_launch
    from taxfree_kernels.cross_compile.instructions import digests, kernel_key
    from taxfree_kernels.cross_compile.record import record
    from taxfree_kernels.hardware import Hardware
    from taxfree_kernels.variant import problem_class

    hardware = Hardware(**request["hardware"])
    problem = problem_class(request["op"])(**request["problem"])
    launches = record(
        request["op"], request["variant"], problem, request["config"], hardware,
        request["heap_bytes"],
    )  # fmt: skip
    if "digest" in request:
        asked = request["digest"]
        launch = launches[asked["launch"]]
        if kernel_key(launch) != asked["key"]:
            raise RuntimeError(f"{launch.name}: the plan is another one under this Triton")
        return digests(launch, hardware, asked["assembly"])
    kernels = []
    for number, launch in enumerate(launches):
        compiled = compile_launch(launch, hardware)
        kernel = {
            "kernel": compiled.kernel,
            "triton": compiled.triton,
            "cache_key": compiled.cache_key,
            "resources": asdict(compiled.resources),
            "violations": _violations(
                compiled,
                request["aligned"],
                launched_early=launch.kernel.options.get("launch_pdl", False),
                begins_call=number == 0,
            ),
        }
        kernels.append(kernel)
    return {"kernels": kernels}


def _violations(compiled: Any, aligned: bool | None, **known: bool) -> list[dict[str, Any]]:
    from taxfree_kernels.cross_compile.asm_checks import Subject, violations
    from taxfree_kernels.cross_compile.compile import matrix_remarks

    of_speed = aligned is not None
    subject = Subject(
        text=compiled.text,
        ttir=compiled.ttir,
        ttgir=compiled.ttgir,
        num_warps=compiled.num_warps,
        num_stages=compiled.num_stages,
        spill_bytes=compiled.resources.spill_bytes,
        matrix_remarks=matrix_remarks(compiled.text) if of_speed else (),
        aligned=bool(aligned),
        **known,
    )
    return [asdict(violation) for violation in violations(subject, of_speed)]


if __name__ == "__main__":
    main()
