"""Counts what attention reads through the L2 of one NVIDIA GPU, for the comparison with the model.

    ncu --kernel-name attend --csv --log-file ncu.csv --metrics $(python benchmarks/l2_ncu.py \
        --metrics) python benchmarks/l2_ncu.py
    python benchmarks/l2_ncu.py ncu.csv    # the result file, still without the model
    python benchmarks/l2_model.py --write  # adds the model; needs numba

ncu empties the caches before each launch.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / each) for each in ("", "kernels", "tuning_db")]

RESULT = ROOT / "benchmarks/results/l2_model/nvidia-h200.json"
HEADS_AND_LENGTHS = ((16, 8192), (128, 8192), (16, 32768), (128, 16384), (64, 32768))
#: one launch each, in this order
CASES: list[dict[str, Any]] = [
    {"heads": heads, "length": length, "mapping": mapping}
    for heads, length in HEADS_AND_LENGTHS
    for mapping in ("naive_block_first", "naive_head_first")
]
TILE = {"BLOCK_M": 128, "BLOCK_N": 64, "TMA": False, "XCDS": 1, "num_warps": 8, "num_stages": 3}
METRICS = {
    "lts__t_sector_hit_rate.pct": "hit_rate",
    "lts__t_sectors_op_read.sum": "sectors_read",
    "lts__t_sectors_op_read_lookup_hit.sum": "sectors_hit",
    "lts__t_sectors_op_read_lookup_miss.sum": "sectors_missed",
    "dram__bytes_read.sum": "dram_read_bytes",
    "gpu__time_duration.sum": "ns",
}


def launch() -> None:
    """Launch each case once."""
    import torch
    import torch.distributed as dist

    from taxfree._runtime.ready import ready_plans
    from taxfree_kernels.attention.problem import Attention
    from taxfree_kernels.fabric.open import open_fabric
    from taxfree_kernels.variant import Ready, operation, variants

    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fabric = open_fabric("cuda", None, 64 << 20, 30.0)
    for case in CASES:
        problem = Attention(
            batch=1, length=case["length"], q_heads=case["heads"], kv_heads=case["heads"],
            head_dim=128, causal=False, packed=False, dtype="bfloat16", world_size=1,
        )  # fmt: skip
        config = TILE | {"MAPPING": case["mapping"]}
        flash = variants("attention")["flash"]
        (plan,) = ready_plans(fabric, [partial(flash.plan, problem, fabric, config)])
        assert isinstance(plan, Ready), plan
        op = operation("attention")
        inputs = op.make_inputs(problem, 0, 1, fabric.device)
        plan(*inputs, op.empty_output(problem, fabric.device))
        torch.cuda.synchronize()


def read(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The cases with their counts, from ncu's CSV."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    counts: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        value = float(row["Metric Value"].replace(",", ""))
        counts[int(row["ID"])][METRICS[row["Metric Name"]]] = value
    return [case | counts[launched] for launched, case in enumerate(CASES)]


def environment() -> dict[str, str]:
    """The device and the versions."""
    import torch

    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    return {"gpu": torch.cuda.get_device_name()} | versions


def main() -> int:
    """Launch the cases, or read what ncu counted."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("csv", nargs="?", type=Path, help="ncu's CSV, to write the result file from")
    made.add_argument("--metrics", action="store_true", help="print the metrics to give to ncu")
    options = made.parse_args()
    if options.metrics:
        print(",".join(METRICS))
    elif options.csv is None:
        launch()
    else:
        cases = read(options.csv.read_text(encoding="utf-8").splitlines())
        result = {"kind": "measured", "environment": environment(), "tile": TILE, "cases": cases}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
