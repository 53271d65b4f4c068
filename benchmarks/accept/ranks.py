"""Runs a module on ranks of this node as torchrun does, and begins as `ready` does.

echo '{}' | python -m benchmarks.accept.ranks 2 benchmarks.accept.train
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time


def main() -> int:
    """Run the command line: how many ranks, the module, its arguments; returns the exit code."""
    ranks, *command = sys.argv[1:]
    of_all = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    of_all |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.accept.ready", *command],
            env=os.environ | of_all | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            text=True,
        )
        for rank in range(int(ranks))
    ]
    line = sys.stdin.readline()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(json.loads(line) | {"MASTER_PORT": str(port)}), file=process.stdin)
            process.stdin.flush()
    codes: list[int | None] = [None]
    while None in codes and not any(codes):
        time.sleep(0.05)
        codes = [process.poll() for process in processes]
    for process in processes:  # after a failure the others wait for ever
        process.kill()
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
