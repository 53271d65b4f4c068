"""Anybody's kernels, executed through the command."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from taxfree_check.executed.decode import instruction
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.program import build_step
from tests.ranks import PYTHON, ROOT, environment
from tests.tritons import needs_3_8

HERE = Path(__file__).with_name("world_example.py")
RING = ROOT / "examples/ring.py"


def executed(target: str, *options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, in a process that compiles."""
    command = [PYTHON, "-m", "taxfree_cli.app", "check", "--executed", target, "--ranks", "2"]
    done = subprocess.run(
        [*command, *options], env=environment(), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@needs_3_8
@pytest.mark.dealt("target")
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "target", [f"{RING}::ring", f"{HERE}::grid_of_three", f"{HERE}::by_barriers"]
)
def test_what_is_right_is_right_when_executed(target: str, architecture: str) -> None:
    code, out, err = executed(target, "--arch", architecture, "--seeds", "6", "--json")
    assert code == 0, err
    assert "Warning" not in err
    runs = json.loads(out)["runs"]
    assert [each["verdict"] for each in runs] == ["right"] * 6
    # who polls by atomics and acquires does not spin on
    assert max(each["instructions"] for each in runs) < 30_000


@pytest.mark.dealt("function")
@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("hangs", 4, "Hang"),
        ("parts", 4, "ranks 0 wait at a barrier that others do not come to"),
        ("wrong", 4, "it holds 0"),
        ("no_world", 2, "takes no world"),
    ],
)
def test_what_is_not_is_told(function: str, code: int, said: str) -> None:
    found, out, err = executed(f"{HERE}::{function}", "--seeds", "1")
    assert found == code
    assert said in out + err
    if code == 4:
        assert f"::{function} --ranks 2 --arch gfx942 --first-seed 0 --seeds 1" in err


def test_other_options_are_refused() -> None:
    for options in (["--program", ""], ["--gpus", "2"], ["--arch", "gfx90a"]):
        code, _, err = executed(f"{HERE}::hangs", *options)
        assert code == 2
        assert "error: " in err


#: met in small kernels of others, and not executed
REFUSED = """
    v_cmp_class_f32_e64 s[2:3], v1, v2
    v_ffbh_u32_e32 v1, v2
    v_fma_f16 v1, v2, v3, v4
    v_add_f16_e32 v1, v2, v3
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 3
    ds_add_u32 v1, v2
    v_bcnt_u32_b32 v1, v2, v3
    v_mfma_i32_16x16x32_i8 a[0:3], v[0:1], v[2:3], a[0:3]
    v_mfma_f64_16x16x4_f64 a[0:7], v[0:1], v[2:3], a[0:7]
    v_mfma_f32_16x16x8_xf32 a[0:3], v[0:1], v[2:3], a[0:3]
    global_atomic_smax v1, v2, s[0:1]
    global_atomic_cmpswap v1, v2, v[4:5], s[0:1] sc0
    global_atomic_pk_add_bf16 v1, v2, s[0:1]
    v_add_u16_e32 v1, v2, v3
"""


@pytest.mark.parametrize("text", [line.strip() for line in REFUSED.strip().splitlines()])
def test_what_is_not_executed_is_refused_by_name(text: str) -> None:
    with pytest.raises(UnknownInstruction, match=re.escape(text.split()[0])):
        build_step(instruction(text), {})
