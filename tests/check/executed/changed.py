"""A program for a process that compiles kernels: what becomes of a variant's mutants, as JSON.

Arguments: an operation, a variant, an architecture, how many mutants of each kernel and kind of
change, and the kinds; none for all. Those that need not be shown are left out.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.check.executed.mutated import result


def main(op: str, variant: str, architecture: str, most_of_a_kind: str, *kinds: str) -> None:
    torch.set_num_threads(1)
    found = result(op, variant, architecture, int(most_of_a_kind), kinds, without_harmless=True)
    print(json.dumps(found.as_json()))


if __name__ == "__main__":
    main(*sys.argv[1:])
