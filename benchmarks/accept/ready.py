"""Imports a module, and runs its `main` once a line with environment variables comes on stdin.

    echo '{}' | python -m benchmarks.accept.ready taxfree_cli.app doctor

To import PyTorch takes seconds, which acceptance spends while the step before runs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

HEAVY = ("torch._dynamo", "torch.distributed.tensor.parallel", "triton")  # commands import late


def main() -> int | None:
    """Run the command line: the module, and its arguments."""
    del sys.argv[0]
    module, *_ = [importlib.import_module(name) for name in (sys.argv[0], *HEAVY)]
    line = sys.stdin.readline()
    if not line:
        return 1  # who has started this process is gone
    os.environ.update(json.loads(line))
    code: int | None = module.main()
    return code


if __name__ == "__main__":
    sys.exit(main())
