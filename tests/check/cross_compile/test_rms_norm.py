"""The RMSNorm kernel of library paths; a ghost cannot plan these, because they need a group."""

from __future__ import annotations

import json

import pytest

from tests.tritons import TRITONS

from .conftest import run_python

#: Prints violations and spilled bytes for usual, tiny, ragged and wide rows.
COMPILE = """
import json
import torch
from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import GhostFabric, Launch
from taxfree_check.cross_compile.worker import checked
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import launching_through
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.baseline import RMSNorm

found = []
for device in ("h200", "mi300x", "mi350x"):
    for m, n, residual in [(16, 8192, True), (1, 16, False), (3, 1001, True), (2, 1 << 15, True)]:
        problem = MatmulAllReduce(m, n, 64, world_size=8, residual=residual, rms_norm=True)
        ghost = GhostFabric(8, KNOWN[device], 1 << 20)
        size = (m, n)
        total, other = (torch.empty(size, dtype=torch.float16, device="meta") for _ in range(2))
        out = torch.empty(2, *size, dtype=torch.float16, device="meta")
        eps = torch.empty(1, device="meta")
        launches = []
        with launching_through(lambda kernel, args: launches.append(Launch(kernel, args))):
            RMSNorm(problem, ghost)(total, other if residual else None, total[0], eps, out)
        compiled = compile_launch(launches[0], KNOWN[device])
        spills = compiled.resources.spill_bytes
        found.append([device, n, spills, checked(compiled, aligned=n % 16 == 0 and n > 16)])
print(json.dumps(found))
"""


@pytest.mark.dealt("triton")
@pytest.mark.parametrize("triton", TRITONS)
def test_it_compiles_well_for_all_devices(triton: str) -> None:
    found = json.loads(run_python("-c", COMPILE, triton=triton))
    assert len(found) == 12
    assert [each for each in found if each[2] or each[3]] == []
