"""Compiles kernels whose warps have roles; prints JSON: what kind of kernel -> kernel.

A kind of the gather is the number of warpgroups, and what else the kernel is told: "folded" where
it multiplies two parts of K at once, and "early" where weights are static, so that they may be
loaded early. Kinds of sums by Lamport words have the rows of the problem.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import GhostFabric, record
from taxfree_kernels.all_gather_matmul.push_specialized import GatherWork
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants

HARDWARE = KNOWN["h200"]
GATHER = ("all_gather_matmul", "push_specialized")
WORDS = {
    "words of sum": ("matmul_all_reduce", "push_two_shot_lamport_specialized"),
    "words of scatter": ("matmul_reduce_scatter", "push_lamport_specialized"),
}

found = {}
op, name = GATHER
for m in (16, 64, 1024):
    problem = problem_class(op)(m=m, n=512, k=1024, gather_dim=1, world_size=2, dtype="bfloat16")
    (config,) = variants(op)[name].seed_configs(problem, HARDWARE)
    for is_static in (False, True):  # which stays for the sums
        GhostFabric.static_weights = is_static
        (launch,) = record(op, name, problem, config, HARDWARE)
        work = GatherWork(*launch.kernel.constants["WORK"])
        told = {"folded": work.FOLD > 1, "early": work.PREFETCH}
        key = " ".join([str(work.WARPGROUPS), *(name for name, is_so in told.items() if is_so)])
        found[key] = asdict(compile_launch(launch, HARDWARE))
for kind, (op, name) in WORDS.items():
    for m in (64, 256):
        problem = problem_class(op)(m=m, n=2048, k=1024, world_size=8, dtype="bfloat16")
        config = variants(op)[name].seed_configs(problem, HARDWARE)[0]
        (launch,) = record(op, name, problem, config, HARDWARE)
        found[f"{kind} {m}"] = asdict(compile_launch(launch, HARDWARE))
print(json.dumps(found))
