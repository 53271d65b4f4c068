"""How processes end that have a runtime: ``python -m tests.taxfree.endings TIMES ENDING...``.

Ranks are forks of this process, which has imported and cached all that they need: so hundreds of
runs take minutes. Each ends as a script does, through the interpreter's own end.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

WORLD = 2
DEADLINE_S = 60.0


def init() -> Any:
    return taxfree.init(db="/nowhere/tuning.sqlite", heap_bytes=4 << 20, timeout_s=10)


def call(rt: Any) -> None:
    x = torch.ones(8, 64, dtype=torch.bfloat16)
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    rt.matmul_reduce_scatter(x, weight)
    rt.all_gather_matmul(x, weight, gather_dim=0)
    assert rt.matmul_all_reduce(x, weight).unique().tolist() == [64 * WORLD]


def close_then_destroy() -> Any:
    rt = init()
    call(rt)
    rt.close()
    dist.destroy_process_group()
    return rt


def destroy_then_close() -> Any:
    rt = init()
    call(rt)
    dist.destroy_process_group()
    rt.close()
    rt.close()
    return rt


def destroy_alone() -> Any:
    rt = init()
    call(rt)
    dist.destroy_process_group()
    return rt


def close_alone() -> Any:
    rt = init()
    call(rt)
    rt.close()
    return rt


def neither() -> Any:
    rt = init()
    call(rt)
    return rt


def dropped() -> Any:
    call(init())
    dist.destroy_process_group()


def block() -> Any:
    with init() as rt:
        call(rt)
    dist.destroy_process_group()
    return rt


def heap_too_small() -> Any:
    with pytest.raises(HeapExhausted, match="64 bytes left") as error:
        taxfree.init(db="/nowhere/tuning.sqlite", heap_bytes=64)
    return error  # and with it the frames that had the fabric


ENDINGS: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (
        close_then_destroy, destroy_then_close, destroy_alone, close_alone, neither, dropped,
        block, heap_too_small,
    )
}  # fmt: skip


def run(ending: Callable[[], Any]) -> list[int] | None:
    """The exit status of each rank; None in a rank, which ends with its caller."""
    global kept
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(WORLD):
        process = os.fork()
        if process == 0:
            # No FileStore: one that is given up while a peer deletes the file waits for ever.
            store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=rank == 0)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
            del store
            kept = ending()  # as a script's variables are until its end
            return None
        ranks.append(process)
    return [_status(process) for process in ranks]


def _status(process: int) -> int:
    """Of a process that has ended; it is killed if it takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, 9)
            deadline += DEADLINE_S
        time.sleep(0.005)


def warm_up() -> None:
    """Import and cache what `init` needs; no thread may start, since forks would lack it."""
    for op in operation_names():
        fingerprints.versions(op)


def main() -> None:
    warm_up()
    times, names = int(sys.argv[1]), sys.argv[2:] or list(ENDINGS)
    for name in names:
        clean = 0
        for _ in range(times):
            statuses = run(ENDINGS[name])
            if statuses is None:
                return
            if statuses == [0] * WORLD:
                clean += 1
            else:
                print(f"{name}: exit statuses {statuses}", flush=True)
        print(f"{name}: {clean} of {times}", flush=True)


kept: Any = None
if __name__ == "__main__":
    import pytest
    import torch
    import torch.distributed as dist

    import taxfree
    import taxfree._runtime.startup
    from taxfree import fingerprints
    from taxfree_kernels.errors import HeapExhausted
    from taxfree_kernels.variant import operation_names

    torch.set_num_threads(1)
    main()
