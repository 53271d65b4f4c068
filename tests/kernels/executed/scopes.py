"""A program for a process that compiles kernels: which changes to a kernel's scopes are caught."""

from __future__ import annotations

import json
from dataclasses import replace

from taxfree_kernels.checker.problems import tiny_problems
from taxfree_kernels.executed.mutate import KINDS, try_mutants

SCOPES = [kind for kind in KINDS if "cache" in kind or kind.startswith("buffer")]


def main() -> None:
    problem = replace(tiny_problems("all_gather_matmul", 2)[1], dtype="bfloat16")
    tried = try_mutants("all_gather_matmul", "push", problem, seeds=(0, 1), kinds=SCOPES)
    print(json.dumps([[one.mutant.kind, one.mutant.before, one.verdict] for one in tried]))


if __name__ == "__main__":
    main()
