"""Compares the model of L2 caches with published hit rates and traffic. Needs no GPU.

    python benchmarks/l2_model.py           # a table
    python benchmarks/l2_model.py --json    # the same rows
    python benchmarks/l2_model.py --write   # the result file and docs/chiplets.md

The model is :mod:`benchmarks.l2`. It takes minutes with numba, which the extra `chiplets`
installs. Interpreted it would take hours, so without numba the rows of the result file are printed.
Hit rates are in percent; traffic is what the L2s read from memory, relative to a kernel that does
not know the chiplets.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "kernels", "tuning_db", "tune")]

from benchmarks import l2  # noqa: E402
from benchmarks.documents import table, with_blocks, write_changed  # noqa: E402
from taxfree_kernels.device.tiles import ATTENTION_MAPPINGS  # noqa: E402

RESULT = ROOT / "benchmarks/results/l2_model/modelled.json"
#: what ncu counted on one H200, with what the model says of it
MEASURED = ROOT / "benchmarks/results/l2_model/nvidia-h200.json"
DOCUMENT = ROOT / "docs/chiplets.md"

HIT_TOLERANCE = 5.0  # points
RATIO_TOLERANCE = 0.1

PAPER_MAPPINGS = ATTENTION_MAPPINGS[:4]
# arXiv 2511.02132: percent, lowest and highest
LONG = dict(zip(PAPER_MAPPINGS, [(1.0, 1.0), (1.0, 1.0), (40.0, 60.0), (90.0, 96.0)], strict=True))
LIGHT = (90.0, 90.0)
# Measured on MI355X by the authors of github.com/ROCm/FlyDSL/pull/919; not fitted to
UNFITTED = {"naive_block_first": 2.36, "swizzled_head_first": 93.62}
LENGTHS = tuple(1024 * thousands for thousands in (8, 16, 32, 64, 128))

# arXiv 2604.15379, Qwen3-8B on MI350X: N and K of QKV, output, gate and up, down projections
GEMMS = (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)
# batch -> M-tile's and M-split's traffic, and the table's hit rates without and with M-tile
FLEET = {
    1: (1.0, 1.0, None, None),
    8: (1.0, 1.0, None, None),
    32: (0.82, 1.10, 39.0, 51.0),
    64: (0.63, 1.20, 39.0, 61.0),
}
# of the kernel that ncu counted: it takes 181 registers of each of 256 threads, and 128 KiB of
# shared memory, compiled for sm_90
H200_PROGRAMS_PER_UNIT = 1

_BLOCK_M = 16  # of the smallest matrix instruction, so that the batch has several tiles of rows


def row(case: str, low: float, high: float, ours: float, tolerance: float) -> dict[str, Any]:
    """One comparison; `within` is whether ours is inside the published range, or near it."""
    return {
        "case": case,
        "published_low": low,
        "published_high": high,
        "ours": round(ours, 2),
        "within": low - tolerance <= round(ours, 2) <= high + tolerance,
    }


def attention_rows(curve: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Hit rates of the four mappings."""
    longest = {
        point["mapping"]: point["hit_rate"] for point in curve if point["length"] == LENGTHS[-1]
    }
    for mapping, (low, high) in LONG.items():
        case = f"MI300X, 128 heads, 128K keys, {mapping}"
        yield row(case, low, high, longest[mapping], HIT_TOLERANCE)
    for mapping in PAPER_MAPPINGS:
        ours = 100 * l2.attention(l2.MI300X, mapping, heads=8, length=8192).hit_rate
        yield row(f"MI300X, 8 heads, 8K keys, {mapping}", *LIGHT, ours, HIT_TOLERANCE)
    for mapping, published in UNFITTED.items():
        ours = 100 * l2.attention(l2.MI350X, mapping, heads=64, length=65536).hit_rate
        case = f"MI355X, 64 heads, 64K keys, {mapping}"
        yield row(case, published, published, ours, HIT_TOLERANCE)


def fleet_rows() -> Iterator[dict[str, Any]]:
    """Traffic of Qwen3-8B's matmuls by Chiplet-tasks, relative to tiles from one queue."""
    for batch, (m_tile, m_split, unaware_hits, m_tile_hits) in FLEET.items():
        tiles_m = -(-batch // _BLOCK_M)

        def total(batch: int = batch, **schedule: Any) -> tuple[int, float]:
            """Bytes missed, and the hit rate in percent."""
            traffic = [
                l2.matmul(l2.MI350X, batch, n, k, block_m=_BLOCK_M, **schedule, simulated=range(8))
                for n, k in GEMMS
            ]
            missed = sum(one.missed for one in traffic)
            return missed, 100 * (1 - missed / sum(one.requested for one in traffic))

        unaware, unaware_rate = total(xcds=1, group_m=tiles_m, queue=True)
        tiled, tiled_rate = total(xcds=8, group_m=tiles_m)
        split, _ = total(xcds=8, group_m=1)
        for name, published, missed in ("M-tile", m_tile, tiled), ("M-split", m_split, split):
            case = f"MI350X, batch {batch}, {name}, traffic"
            yield row(case, published, published, missed / unaware, RATIO_TOLERANCE)
        rates = ("one queue", unaware_hits, unaware_rate), ("M-tile", m_tile_hits, tiled_rate)
        for name, hits, ours in rates:
            if hits is not None:
                case = f"MI350X, batch {batch}, {name}, hit rate"
                yield row(case, hits, hits, ours, HIT_TOLERANCE)


def curve_points(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Hit rates of the four mappings against the length, 128 heads on MI300X."""
    for length in lengths:
        for mapping in PAPER_MAPPINGS:
            traffic = l2.attention(l2.MI300X, mapping, heads=128, length=length, simulated=range(2))
            yield {
                "length": length,
                "mapping": mapping,
                "hit_rate": round(100 * traffic.hit_rate, 1),
            }


CHANGES: list[dict[str, Any]] = [
    {},
    {"jitter": 0.25},
    {"jitter": 0.35},
    {"memory_ns": 600.0, "side_ns": 400.0},
    {"memory_ns": 800.0, "side_ns": 500.0},
    {"side_ns": 700.0, "side_bytes_per_s": 5.3e12},
]


def sensitivity_points() -> Iterator[dict[str, Any]]:
    """Hit rates of fitted and unfitted cases with other values of what is fitted or assumed."""
    cases = (
        *(
            (l2.MI300X, 128, 131072, mapping)
            for mapping in (PAPER_MAPPINGS[0], *PAPER_MAPPINGS[2:])
        ),
        *((l2.MI350X, 64, 65536, mapping) for mapping in UNFITTED),
    )
    for change in CHANGES:
        rates = [
            l2.attention(
                dataclasses.replace(device, **change), mapping, heads=heads, length=length
            ).hit_rate
            for device, heads, length, mapping in cases
        ]
        yield {"change": change, "hit_rates": [round(100 * rate, 1) for rate in rates]}


def balance_points() -> Iterator[dict[str, Any]]:
    """Our own mapping where XCDs do not divide the heads, and with a causal mask; on MI300X."""
    for heads, kv_heads, causal in (10, 10, False), (10, 10, True), (40, 8, True), (64, 64, True):
        for mapping in "swizzled_head_first", "balanced_head_first":
            traffic = l2.attention(
                l2.MI300X, mapping, heads=heads, kv_heads=kv_heads, length=16384, causal=causal,
                simulated=range(8),
            )  # fmt: skip
            yield {
                "heads": heads,
                "kv_heads": kv_heads,
                "causal": causal,
                "mapping": mapping,
                "hit_rate": round(100 * traffic.hit_rate, 1),
                "missed_bytes": traffic.missed,
                "us": round(traffic.us),
                "imbalance": round(traffic.imbalance, 3),
            }


def with_model(case: Mapping[str, Any], tile: Mapping[str, Any]) -> dict[str, Any]:
    """A case that ncu counted on H200, of a kernel with this tile, with what the model says."""
    heads, length = case["heads"], case["length"]
    traffic = l2.attention(
        l2.H200, case["mapping"], heads=heads, length=length,
        block_m=tile["BLOCK_M"], block_n=tile["BLOCK_N"],
        in_flight=H200_PROGRAMS_PER_UNIT, simulated=range(l2.H200.caches),
    )  # fmt: skip
    ours = round(100 * traffic.hit_rate, 2)
    difference = round(ours - case["hit_rate"], 2)
    modelled = {"hit_rate": ours, "missed_bytes": traffic.missed, "difference": difference}
    return dict(case) | {"requested_bytes": traffic.requested, "modelled": modelled}


def h200_rows(cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Hit rates on H200; what ncu counted stands as published."""
    for gpu in cases:
        case = f"H200, {gpu['heads']} heads, {gpu['length'] // 1024}K keys, {gpu['mapping']}"
        rate = gpu["hit_rate"]
        yield row(case, rate, rate, gpu["modelled"]["hit_rate"], HIT_TOLERANCE)


def parameters() -> dict[str, Any]:
    """The model's parameters that are not fitted."""
    return {
        name: {field: getattr(of, field) for field in ("caches", "units", "capacity", "ways")}
        | dataclasses.asdict(of.sheet)
        | {f: getattr(of, f) for f in ("side_bytes_per_s", "hit_ns", "memory_ns", "side_ns")}
        for name, of in (("MI300X", l2.MI300X), ("MI350X", l2.MI350X), ("H200", l2.H200))
    }


def comparison(curve: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows; `curve` has the points of the longest sequence."""
    return [*attention_rows(curve), *fleet_rows()]


def computed() -> dict[str, Any]:
    """The content of the result file."""
    curve = list(curve_points(LENGTHS))
    return {
        "kind": "modelled",
        "parameters": parameters(),
        "fitted": {"jitter": l2.MI300X.jitter},
        "fitted_to": f"MI300X, 128 heads, 128K keys, {PAPER_MAPPINGS[2]}",
        "rows": comparison(curve),
        "curve": curve,
        "sensitivity": list(sensitivity_points()),
        "balance": list(balance_points()),
    }


def span(low: float, high: float) -> str:
    """A published range."""
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def rows_table(result: Mapping[str, Any]) -> str:
    """Published and ours, in Markdown."""
    rows = (
        (
            line["case"],
            span(line["published_low"], line["published_high"]),
            f"{line['ours']:.2f}" if "traffic" in line["case"] else f"{line['ours']:.1f}",
            "" if line["within"] else "no",
        )
        for line in result["rows"]
    )
    return table(("case", "published", "ours", "reproduced"), rows, text=(0, 3))


def sensitivity_table(result: Mapping[str, Any]) -> str:
    """Hit rates with other parameters, in Markdown."""
    rows = (
        (
            ", ".join(f"{name} {value:g}" for name, value in point["change"].items()) or "as above",
            *(f"{rate:.1f}" for rate in point["hit_rates"]),
        )
        for point in result["sensitivity"]
    )
    long = ("naive block-first, 128K", "naive head-first, 128K", "swizzled head-first, 128K")
    header = ("parameters", *long, "naive block-first, 64K", "swizzled head-first, 64K")
    return table(header, rows, text=(0,))


def balance_table(result: Mapping[str, Any]) -> str:
    """Our own mapping beside the paper's, in Markdown."""
    rows = (
        (
            f"{point['heads']} ({point['kv_heads']})",
            "causal" if point["causal"] else "full",
            point["mapping"],
            f"{point['imbalance']:.3f}",
            f"{point['hit_rate']:.1f}",
            f"{point['missed_bytes'] / 1e9:.2f}",
            f"{point['us']:.0f}",
        )
        for point in result["balance"]
    )
    header = (
        *("heads (of K, V)", "mask", "mapping"),
        *("most work / mean", "hit rate, %", "missed, GB", "time, us"),
    )
    return table(header, rows, text=(1, 2))


def h200_table(measured: Mapping[str, Any]) -> str:
    """What ncu counted on H200 and ours, in Markdown."""

    def cells(case: Mapping[str, Any]) -> tuple[str, ...]:
        ours = case["modelled"]
        return (
            f"{case['hit_rate']:.1f}",
            f"{ours['hit_rate']:.1f}",
            f"{ours['difference']:+.1f}",
            f"{case['dram_read_bytes'] / 1e9:.2f}, {ours['missed_bytes'] / 1e9:.2f}",
        )

    cases = measured["cases"]
    rows = (
        (f"{first['heads']}, {first['length'] // 1024}K", *cells(first), *cells(second))
        for first, second in zip(cases[::2], cases[1::2], strict=True)
    )
    columns = ("ncu", "ours", "difference", "from DRAM: ncu, ours, GB")
    named = (f"{order}: {column}" for order in ("block-first", "head-first") for column in columns)
    return table(("heads, keys", *named), rows, text=(0,))


BLOCKS = {
    "published and ours": rows_table,
    "sensitivity": sensitivity_table,
    "balance": balance_table,
}


def document(result: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """The page with the result files' tables."""
    texts = {name: make(result) for name, make in BLOCKS.items()}
    texts["counted on the gpu"] = h200_table(measured)
    makers = {name: lambda _, text=text: text for name, text in texts.items()}
    return with_blocks(DOCUMENT.read_text(encoding="utf-8"), makers)


def main() -> int:
    """Run the comparison."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--json", action="store_true", help="print the rows as JSON")
    made.add_argument("--write", action="store_true", help="write the result file and documents")
    options = made.parse_args()
    has_numba = importlib.util.find_spec("numba") is not None
    if options.write and not has_numba:
        made.error("--write needs numba: pip install '.[chiplets]'")
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    if has_numba:
        measured["cases"] = [with_model(case, measured["tile"]) for case in measured["cases"]]
    if options.write:
        result = computed()
        for path, content in ((RESULT, result), (MEASURED, measured)):
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        write_changed({DOCUMENT: document(result, measured)})
    elif has_numba:
        result = {"rows": comparison(list(curve_points(LENGTHS[-1:])))}
    else:
        print("numba is not installed: these are the committed rows", file=sys.stderr)
        result = json.loads(RESULT.read_text(encoding="utf-8"))
    result["rows"] = [*result["rows"], *h200_rows(measured["cases"])]
    print(json.dumps(result["rows"], indent=1) if options.json else rows_table(result).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
