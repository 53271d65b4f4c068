"""A program for a process that compiles kernels: the schedules in which a stencil gives up wrongly.

Of two ranks one is silent, and waves of the highest priority run far ahead.
"""

from __future__ import annotations

import json

from taxfree_check.executed.check import default_config, tiny_problems
from taxfree_check.executed.program import Program
from taxfree_check.executed.run import run
from taxfree_check.executed.tactics import Tactics

CASE = "stencil", "persistent"
AHEAD = Tactics(promptness=1.0, by_priority=True)


def main() -> None:
    problem = tiny_problems(CASE[0], 2)[2]
    config = default_config(*CASE, problem, "gfx942")
    programs: dict[str, Program] = {}
    wrong: dict[str, list[int]] = {}
    for silent in (0, 1):
        shown = [
            run(*CASE, problem, config, seed, silent=silent, tactics=AHEAD, programs=programs)
            for seed in range(12)
        ]
        wrong[f"silent {silent}"] = [each.seed for each in shown if each.verdict != "right"]
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
