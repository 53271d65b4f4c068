"""A program for a process that compiles kernels: which changes to a kernel's scopes are caught."""

from __future__ import annotations

import json
from dataclasses import replace

from taxfree_kernels.executed.mutate import KINDS, try_mutants
from taxfree_kernels.variant import operation_shapes

SCOPES = [kind for kind in KINDS if "cache" in kind or kind.startswith("buffer")]


def main() -> None:
    problem = replace(operation_shapes("all_gather_matmul").tiny(2)[1], dtype="bfloat16")
    tried = try_mutants("all_gather_matmul", "push", problem, seeds=(0, 1), kinds=SCOPES)
    print(json.dumps([[one.mutant.kind, one.mutant.before, one.verdict] for one in tried]))


if __name__ == "__main__":
    main()
