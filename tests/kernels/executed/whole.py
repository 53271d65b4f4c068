"""A program for a process that compiles kernels: execute configs of variants, and report.

Arguments: cases; "repaired" to wait behind each write-back, as LLVM before February 2026 does not
always do; "adverse" for tactics that show it.
"""

from __future__ import annotations

import json
import re
import sys

from taxfree_kernels.cross_compile.coverage import other_configs
from taxfree_kernels.executed import run
from taxfree_kernels.executed.check import check_config, kernels
from taxfree_kernels.executed.decode import Listing, decode
from taxfree_kernels.executed.run import DEVICES
from taxfree_kernels.executed.tactics import Tactics
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_shapes, variants


def repaired(text: str) -> Listing:
    return decode(re.sub(r"(\tbuffer_wbl2.*\n)", r"\1\ts_waitcnt vmcnt(0)\n", text))


def main() -> None:
    if "repaired" in sys.argv:
        run.decode = repaired  # type: ignore[attr-defined]
    if "adverse" in sys.argv:
        adverse = Tactics(0.02, stalls=0.7, resident=2, by_priority=True, grain="coarse")
        Tactics.drawn = lambda rng: adverse  # type: ignore[method-assign]
    found = []
    for op, name, world, at, corner, architecture, seeds in json.loads(sys.argv[1]):
        problem, variant = operation_shapes(op).tiny(world)[at], variants(op)[name]
        hardware = KNOWN[DEVICES[architecture]]
        if variant.unsupported_reason(problem, hardware):
            continue
        config = variant.seed_configs(problem, hardware)[0]
        if corner is not None:
            corners = other_configs(variant, problem, hardware)
            config = corners[corner % len(corners)]
        checked = check_config(op, name, problem, config, seeds, architecture)
        shares = {each.kernel: each.share_never for *_, each in kernels([checked])}
        found.append(checked.as_json() | {"shares": shares})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
