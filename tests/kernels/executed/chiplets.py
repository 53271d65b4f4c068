"""A program for a process that compiles kernels: signals that programs of a chiplet share.

The arrivals of one run do not write back the L2 of their chiplet; then some stores are not there.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from taxfree_kernels.executed.run import Change, run
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_shapes, variants

_AT_THE_DEVICE = re.compile(r"^\s*buffer_wbl2 sc1$", re.MULTILINE)


def verdicts(change: Change | None, seeds: range) -> list[str]:
    """How runs of push end, whose senders on each of two chiplets signal together."""
    problem = replace(operation_shapes("all_gather_matmul").tiny(2)[1], dtype="bfloat16")
    default = variants("all_gather_matmul")["push"].seed_configs(problem, KNOWN["mi300x"])[0]
    config = {**default, "SPLIT_K": 1, "CHUNKS": 4, "XCD_SIGNALS": 2}
    found = (
        run("all_gather_matmul", "push", problem, config, seed, change=change) for seed in seeds
    )
    return [each.verdict for each in found]


def main() -> None:
    weaker = verdicts(lambda text: _AT_THE_DEVICE.sub("\ts_nop 0", text), range(6))
    print(json.dumps({"right": verdicts(None, range(3)), "without a write-back": weaker}))


if __name__ == "__main__":
    main()
