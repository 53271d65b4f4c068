"""A program for a process that compiles kernels: execute configs of variants, and report."""

from __future__ import annotations

import json
import sys

from taxfree_kernels.cross_compile.coverage import other_configs
from taxfree_kernels.executed.check import check_config
from taxfree_kernels.executed.run import DEVICES
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_shapes, variants


def main() -> None:
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
        shares = {each.kernel: each.share_never for each in checked.kernels}
        found.append(checked.as_json() | {"shares": shares})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
