"""A program for a process that compiles kernels: execute configs of variants, and report.

Arguments: cases, and the architecture; "repaired" to wait behind each write-back, as LLVM before
February 2026 does not always do; "adverse" for tactics that show it.
"""

from __future__ import annotations

import json
import re
import sys

from taxfree_check.cross_compile.coverage import other_configs
from taxfree_check.executed import run
from taxfree_check.executed.check import check_config, default_config, kernels, tiny_problems
from taxfree_check.executed.decode import Listing, decode
from taxfree_check.executed.run import DEVICES
from taxfree_check.executed.tactics import Tactics
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import variants


def repaired(text: str) -> Listing:
    return decode(re.sub(r"(\tbuffer_wbl2.*\n)", r"\1\ts_waitcnt vmcnt(0)\n", text))


def main() -> None:
    if "repaired" in sys.argv:
        run.decode = repaired  # type: ignore[attr-defined]
    if "adverse" in sys.argv:
        adverse = Tactics(0.02, stalls=0.7, resident=2, by_priority=True, grain="coarse")
        Tactics.drawn = lambda rng: adverse  # type: ignore[method-assign]
    found = []
    architecture = sys.argv[2]
    hardware = KNOWN[DEVICES[architecture]]
    for op, name, world, at, corner, seeds in json.loads(sys.argv[1]):
        problem, variant = tiny_problems(op, world)[at], variants(op)[name]
        if variant.unsupported_reason(problem, hardware):
            continue
        config = default_config(op, name, problem, architecture)
        if corner is not None:
            corners = other_configs(variant, problem, hardware)
            config = corners[corner % len(corners)]
        found.append(check_config(op, name, problem, config, seeds, architecture))
    shares = [(*of, each.kernel, each.share_never) for *of, each in kernels(found)]
    print(json.dumps({"checks": [each.as_json() for each in found], "shares": shares}))


if __name__ == "__main__":
    main()
