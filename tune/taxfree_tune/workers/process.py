"""Starting the process of a rank worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, Popen
from typing import Any


def start_worker(
    options: Mapping[str, Any],
    variables: Mapping[str, str],
    connection: int,
    log: int,
    other_files: Sequence[int] = (),
) -> Popen[bytes]:
    """Start a worker that ends with this process.

    Args:
        options: of the worker's command line; `connection` and `controller` are added.
        variables: environment variables, added to this process's.
        connection: descriptor of the worker's end of the pipe to its controller.
        log: descriptor that it prints to.
        other_files: descriptors that it inherits, too.
    """
    own_values = {"connection": connection, "controller": os.getpid()}
    command = [sys.executable, "-m", "taxfree_tune.workers.worker"]
    command += [f"--{name}={value}" for name, value in {**options, **own_values}.items()]
    return Popen(
        command,
        env=_environment(str(options["fabric"])) | dict(variables),
        pass_fds=(connection, *other_files),
        stdin=DEVNULL,
        stdout=log,
        stderr=log,
    )


def _environment(fabric: str) -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if fabric == "host":
        environment["TRITON_INTERPRET"] = "1"
        environment["OMP_NUM_THREADS"] = "1"
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    roots = [path for path in sys.path if path]
    environment["PYTHONPATH"] = os.pathsep.join(roots)
    return environment
