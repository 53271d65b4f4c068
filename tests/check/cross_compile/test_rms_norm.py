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
from taxfree_kernels.matmul_all_reduce.operation import empty_output

found = []
for device in ("h200", "mi300x", "mi350x"):
    for m, n, residual, out_scales in [
        (16, 8192, True, "none"), (1, 16, False, "none"), (3, 1001, True, "none"),
        (2, 1 << 15, True, "none"), (16, 8192, True, "tensor"), (3, 1001, True, "channel"),
        (16, 5120, True, "block"), (1, 16, False, "block"),
    ]:
        problem = MatmulAllReduce(
            m, n, 64, world_size=8, residual=residual, rms_norm=True, out_scales=out_scales
        )
        ghost = GhostFabric(8, KNOWN[device], 1 << 20)
        size = (m, n)
        total, other = (torch.empty(size, dtype=torch.float16, device="meta") for _ in range(2))
        out = empty_output(problem, torch.device("meta"))
        eps = torch.empty(1, device="meta")
        norm = (total[0], eps, eps) if out_scales == "tensor" else (total[0], eps)
        launches = []
        with launching_through(lambda kernel, args: launches.append(Launch(kernel, args))):
            RMSNorm(problem, ghost)(total, other if residual else None, out, *norm)
        compiled = compile_launch(launches[0], KNOWN[device])
        spills = compiled.resources.spill_bytes
        violations = checked(compiled, aligned=n % 16 == 0 and n > 16)
        found.append([device, out_scales, n, spills, violations])
print(json.dumps(found))
"""


@pytest.mark.dealt("triton")
@pytest.mark.parametrize("triton", TRITONS)
def test_it_compiles_well_for_all_devices(triton: str) -> None:
    found = json.loads(run_python("-c", COMPILE, triton=triton))
    assert len(found) == 24
    assert [each for each in found if each[3] or each[4]] == []
