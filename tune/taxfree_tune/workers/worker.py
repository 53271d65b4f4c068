"""A rank worker: one disposable process that runs tasks of its controller on an open fabric.

Started by :class:`~taxfree_tune.workers.group.WorkerGroup` as ``python -m`` this module. A task is
any function ``(fabric, ...)`` of a module; all ranks run the same one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pkgutil
import re
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from taxfree.errors import HardwareError, TaxfreeError, WorkerLost, one_line

_PR_SET_PDEATHSIG = 1
#: what torch's store and gloo say after they have waited for a peer
_WAITED = re.compile(r"wait timeout|Timed out waiting|Socket Timeout|timed out after", re.I)


def main() -> None:
    """Serve tasks until the controller hangs up."""
    parser = argparse.ArgumentParser()
    for name in (
        "rank", "world_size", "connection", "heap_bytes", "controller", "store_port",
        "store_socket",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--fabric", required=True)
    parser.add_argument("--timeout_s", type=float, required=True)
    options = parser.parse_args()
    _die_with_the_controller(options.controller)
    connection = Connection(options.connection)
    try:
        fabric = _open(options)
    except Exception as error:
        connection.send(("failed", failure(error)))
        return
    connection.send(("done", fabric.hardware))
    _serve(connection, fabric)
    sys.stdout.flush()
    os._exit(0)  # captured collectives make an orderly teardown of NCCL take seconds


def _die_with_the_controller(controller: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what Ctrl-C ends
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != controller:  # it died before this process could ask to follow
        sys.exit(1)


def _open(options: argparse.Namespace) -> Any:
    import torch
    import torch.distributed as dist

    from taxfree_kernels.fabric.open import choose, open_fabric

    name = choose(options.fabric)
    backend, device = "gloo", None
    if name == "host":
        torch.set_num_threads(1)
    else:
        backend, gpu = _backend_and_gpu(options.rank, options.world_size, torch.cuda.device_count())
        torch.cuda.set_device(gpu)
        device = torch.device("cuda", gpu) if "nccl" in backend else None
    store = dist.TCPStore(
        "127.0.0.1",
        options.store_port,
        options.world_size,
        is_master=options.rank == 0,
        master_listen_fd=options.store_socket if options.rank == 0 else None,
        wait_for_workers=False,
    )
    dist.init_process_group(
        backend,
        store=store,
        rank=options.rank,
        world_size=options.world_size,
        timeout=timedelta(seconds=max(60.0, 2 * options.timeout_s)),
        device_id=device,
    )
    return open_fabric(name, None, options.heap_bytes, options.timeout_s)


def _backend_and_gpu(rank: int, world_size: int, gpus: int) -> tuple[str, int]:
    """The backend of the process group, and a rank's GPU; NCCL refuses ranks that share one."""
    return "gloo" if world_size > gpus else "cpu:gloo,cuda:nccl", rank % gpus


def _serve(connection: Connection, fabric: Any) -> None:
    while True:
        try:
            call = connection.recv()
        except EOFError:
            break
        if call is None:
            break
        task, args, kwargs = call
        try:
            reply = ("done", pkgutil.resolve_name(task)(fabric, *args, **kwargs))
        except Exception as error:
            reply = ("failed", failure(error))
        connection.send(reply)
    if fabric.backend == "interpreter":
        import torch.distributed as dist

        fabric.close()
        dist.destroy_process_group()


def failure(error: Exception) -> dict[str, Any]:
    """What is told of an error in a task; see `TaskFailed`."""
    is_for_users = isinstance(getattr(error, "message", None), str)
    told: Any = error if is_for_users else _explanation(error)
    return {
        "kind": type(error).__name__,
        "message": told.message,
        "hint": getattr(told, "hint", ""),
        "exit_code": getattr(told, "exit_code", 1),
        "is_secondary": getattr(error, "is_secondary", isinstance(told, WorkerLost)),
        "traceback": traceback.format_exc(),
    }


def _explanation(error: Exception) -> TaxfreeError:
    """The message for an error that was not written for users."""
    said = one_line(error)
    if "out of memory" in said:
        return HardwareError(
            f"out of GPU memory: {said}", "`taxfree doctor` names other processes on the GPUs"
        )
    if re.search(r"(CUDA|HIP|NCCL) error|Triton Error \[(CUDA|HIP)\]|No (CUDA|HIP) GPUs", said):
        return HardwareError(
            f"a GPU or its driver fails: {said}",
            "`taxfree doctor` names other processes on the GPUs, and what drivers say",
        )
    is_too_large = isinstance(error, MemoryError | OverflowError)
    if is_too_large or "can't allocate memory" in said:
        return TaxfreeError(f"out of memory: {said}", "try smaller shapes, or fewer ranks")
    if _WAITED.search(said):
        return WorkerLost(f"a peer did not come: {said}", "see which rank is stopped or stuck")
    return TaxfreeError(said, "this should not happen; TAXFREE_DEBUG=1 shows where it did")


if __name__ == "__main__":
    main()
