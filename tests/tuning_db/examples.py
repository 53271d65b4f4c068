"""Records to test with, and processes that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from taxfree_tuning_db import (
    HardwareFingerprint,
    Measurement,
    Record,
    SoftwareFingerprint,
    TrialRecord,
)

ROOT = Path(__file__).parents[2]

H200 = HardwareFingerprint("NVIDIA H200", "sm_90", 132, 150_754_820_096, "nvlink-18")
MI300X = HardwareFingerprint("AMD Instinct MI300X", "gfx942", 304, 206_141_652_992, "xgmi-7", 8)
SOFTWARE = SoftwareFingerprint("1.0.0", "3.6.0", "2.11.0", "580.65", "cuda 13.0", "nccl 2.28.9")
VERSIONS = {"push": 2, "baseline": 1}
OP = "all_gather_matmul"

PUSH = Measurement(
    variant="push",
    config={"block_m": 64, "layout": "nk", "persistent": True, "share": 0.5},
    version=2,
    median_us={"eager": 60.5, "graph": 28.25},
    iqr_us={"eager": 2.0, "graph": 0.5},
    samples=50,
    relative_error=0.0019,
)
BASELINE = Measurement(
    "baseline", {}, 1, {"eager": 110.0, "graph": 41.0}, {"eager": 5.0, "graph": 0.5}, 50, None
)
TRIAL = TrialRecord("push", {"block_m": 64}, "measured", "", {"graph": 28.5}, 1.5, 2)
HUNG = TrialRecord("push", {"block_m": 256}, "hung", "rank 3 missed its deadline", {}, 30.0, 2)


def problem_of(m: int, **fields: Any) -> dict[str, Any]:
    sizes = {"m": m, "n": 3584, "k": 8192, "gather_dim": 0, "world_size": 8, "dtype": "bfloat16"}
    return sizes | {"x_dtype": "same", "scales": "none", "fast_accumulation": False} | fields


def record_of(m: int = 16, **fields: Any) -> Record:
    record = Record(
        op=OP,
        problem=problem_of(m),
        hardware=H200,
        software=SOFTWARE,
        winner=PUSH,
        baseline=BASELINE,
        runners_up=(replace(PUSH, config={"block_m": 128}),),
        trials=120,
        seconds_spent=95.5,
        provenance={"source": "user", "created": "2026-01-02T03:04:05+00:00"},
    )
    return replace(record, **fields)


def start_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    paths = os.pathsep.join(map(str, [ROOT, ROOT / "tuning_db"]))
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
