"""Compiles a kernel whose warps have roles; prints JSON: number of warpgroups -> kernel."""

from __future__ import annotations

import json
from dataclasses import asdict

from taxfree_kernels.cross_compile.compile import compile_launch
from taxfree_kernels.cross_compile.record import record
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants

OP, NAME, HARDWARE = "all_gather_matmul", "push_specialized", KNOWN["h200"]

found = {}
for m in (64, 1024):
    problem = problem_class(OP)(m=m, n=512, k=1024, gather_dim=1, world_size=2, dtype="bfloat16")
    for config in variants(OP)[NAME].seed_configs(problem, HARDWARE):
        (launch,) = record(OP, NAME, problem, config, HARDWARE)
        warpgroups = launch.kernel.constants["WORK"].WARPGROUPS
        key = f"{int(warpgroups)}{' next' * config['LAUNCH_NEXT']}"
        if key not in found:
            found[key] = asdict(compile_launch(launch, HARDWARE))
print(json.dumps(found))
