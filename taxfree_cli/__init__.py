"""The command line of taxfree: one module per command, and how results are shown."""

import os
import signal
import sys
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\nhint: nothing was begun\n")
    os._exit(130)


def imports_are_done() -> None:
    """From here on Ctrl-C is an exception."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Ctrl-C while the command is imported, which takes a second, would end it with a traceback.
_started = [os.path.basename(word) for word in sys.orig_argv[1:3]]
if {"taxfree", "taxfree_cli.app"}.intersection(_started) and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _end)
