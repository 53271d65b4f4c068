"""Compiles calls with BY_WARP; prints JSON: kind of call -> its kernels, the splits' first."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import record
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants

OP, NAME, HARDWARE = "flash_decode", "splits", KNOWN["h200"]
DENSE = problem_class(OP)(1, 96, 12, 128, 8192, dtype="bfloat16")
KINDS = {"dense": DENSE, "paged": replace(DENSE, page_size=16), "batch": replace(DENSE, batch=8)}

found = {}
for is_promised in (False, True):
    Fabric.static_cache = is_promised
    for kind, problem in KINDS.items():
        seeds = variants(OP)[NAME].seed_configs(problem, HARDWARE)
        config = next(each for each in seeds if each["BY_WARP"]) | {"num_stages": 4}
        launches = record(OP, NAME, problem, config, HARDWARE)
        kernels = [asdict(compile_launch(launch, HARDWARE)) for launch in launches]
        found[kind + " promised" * is_promised] = kernels
print(json.dumps(found))
