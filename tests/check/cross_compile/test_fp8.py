"""fp8 factors are multiplied as they are, each step is added by itself, and scales come early."""

from __future__ import annotations

import json

import pytest

from tests.tritons import BEFORE_3_8, TRITONS

from .conftest import run_python

#: Prints device, variant and scales, violations, and matrix instructions.
COMPILE = """
import json, re
import torch, triton
from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import Launch, record
from taxfree_check.cross_compile.worker import checked
from taxfree_kernels.fp8 import dtype_of
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.quantise import _quantise
from taxfree_kernels.variant import SCALES, problem_class, variants

MATRIX = r"wgmma\\.mma_async\\S+|v_mfma_\\S+"
QUANTISES = r"cvt\\.rn\\.satfinite\\.e4m3x2\\.f32|v_cvt_pk_fp8_f32|v_cvt_scalef32_pk_fp8_f32"
SUM, GATHER, SCATTER = "matmul_all_reduce", "all_gather_matmul", "matmul_reduce_scatter"
SENT, found = [(SUM, "push_two_shot", "channel"), (SCATTER, "push", "channel")], []
CASES = {
    "h200": [
        *((SUM, name, scales)
          for name in ("push_two_shot_lamport", "push_two_shot_lamport_specialized")
          for scales in SCALES),
        (SCATTER, "push_lamport_specialized", "block"),
        *SENT,
        *((GATHER, name, scales)
          for name in ("push_tma", "push_specialized")
          for scales in SCALES),
        *((GATHER, "push_specialized", "channel", m) for m in (128, 256)),
        (GATHER, "push_specialized", "block", 256),
    ],
    # elsewhere a gather waits for the scales of its blocks
    "mi300x": [*((SUM, "push_two_shot_lamport", scales) for scales in SCALES),
               *SENT,
               *((GATHER, "push", scales) for scales in SCALES[:2])],
}
CASES["mi350x"] = CASES["mi300x"]
for device, cases in CASES.items():
    hardware = KNOWN[device]
    for op, name, scales, *rows in cases:
        wire = {"m": 1024, "fp8_wire": True} if (op, name, scales) in SENT else {"m": 16}
        wire |= {"m": m for m in rows}
        problem = problem_class(op)(
            n=8192, k=2048, dtype="bfloat16", world_size=2, x_dtype="fp8", scales=scales, **wire
        )
        config = variants(op)[name].seed_configs(problem, hardware)[0]
        (launch,) = record(op, name, problem, config, hardware)
        compiled = compile_launch(launch, hardware)
        kinds = sorted(set(re.findall(MATRIX, compiled.text)))
        # before 3.7 Triton rounds to e4m3 by integer instructions on gfx950
        by_integers = device == "mi350x" and triton.__version__.startswith("3.6")
        assert "fp8_wire" not in wire or by_integers or re.search(QUANTISES, compiled.text)
        of_steps = [each for loop in compiled.k_loops for each in compiled.code.inside(loop)]
        # scales of blocks are in shared memory by then: a step does not wait for memory
        assert "specialized" not in name or not any("ld.global" in each.text for each in of_steps)
        found.append([device, f"{name} {scales}", checked(compiled, aligned=True), kinds])
    kind = dtype_of(hardware.architecture)
    for width, groups, is_static, is_gated in (
        (16384, 1, False, False), (128, 32, False, False), (128, 32, True, False),
        (16384, 1, False, True), (128, 32, False, True),
    ):
        constants = {"WIDTH": width, "GROUPS": groups, "IS_STATIC": is_static, "IS_GATED": is_gated}
        options = compile_options(hardware.backend, {"num_warps": 16 // groups or 4})
        kernel = Kernel(_quantise, 64, constants, options)
        x, scale = torch.empty(64, 14336, dtype=torch.bfloat16, device="meta"), None
        scale, values = torch.empty(64, 112, device="meta"), x.to(kind)
        compiled = compile_launch(Launch(kernel, (x, scale, values, 14336, 14336, 112)), hardware)
        found.append([device, "quantise", checked(compiled, aligned=True), []])
print(json.dumps(found))
"""
MATRIX = {
    "h200": {"wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"},
    "mi300x": {"v_mfma_f32_16x16x32_fp8_fp8"},
    "mi350x": {"v_mfma_f32_16x16x128_f8f6f4"},
}


@pytest.mark.timeout(600)
@pytest.mark.dealt("triton")
@pytest.mark.parametrize("triton", TRITONS)
def test_fp8_compiles_well_for_all_devices(triton: str) -> None:
    found = json.loads(run_python("-c", COMPILE, triton=triton))
    assert len(found) == 47
    for device, case, violations, kinds in found:
        if triton in BEFORE_3_8 and device != "h200":
            continue  # refused there
        assert violations == [], (device, case)
        of_few_rows = {kind.replace("n128k", "n16k") for kind in kinds}
        assert case == "quantise" or of_few_rows == MATRIX[device]
