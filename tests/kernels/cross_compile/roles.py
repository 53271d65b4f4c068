"""Compiles a kernel whose warps have roles; prints JSON: kind -> kernel.

A kind is the number of warpgroups, and what else the kernel is told: "folded" where it multiplies
two parts of K at once, "early" where weights are static, so that they may be loaded early, and
"next" where the next kernel may be launched early.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from taxfree_kernels.all_gather_matmul.push_specialized import Work
from taxfree_kernels.cross_compile.compile import compile_launch
from taxfree_kernels.cross_compile.record import GhostFabric, record
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants

OP, NAME, HARDWARE = "all_gather_matmul", "push_specialized", KNOWN["h200"]

GhostFabric.static_weights = True
found = {}
for m in (16, 64, 1024):
    problem = problem_class(OP)(m=m, n=512, k=1024, gather_dim=1, world_size=2, dtype="bfloat16")
    waiting, early = variants(OP)[NAME].seed_configs(problem, HARDWARE)
    for config in (waiting, early, waiting | {"LAUNCH_NEXT": False}):
        (launch,) = record(OP, NAME, problem, config, HARDWARE)
        work = Work(*launch.kernel.constants["WORK"])
        told = {
            "folded": work.FOLD > 1, "early": work.PREFETCH, "next": work.LAUNCH_NEXT
        }  # fmt: skip
        key = " ".join([str(work.WARPGROUPS), *(name for name, is_so in told.items() if is_so)])
        found[key] = asdict(compile_launch(launch, HARDWARE))
print(json.dumps(found))
