"""How the scripts here end: as the command line does."""

from __future__ import annotations

from collections.abc import Callable

from taxfree_cli.exits import INTERRUPTED, failure
from taxfree_cli.output import print_failure


def exit_code(run: Callable[[], None]) -> int:
    """Run a script; what goes wrong is told in a line, with a hint and an exit code."""
    try:
        run()
    except KeyboardInterrupt:
        told = INTERRUPTED
    except Exception as error:
        told = failure(error)
    else:
        return 0
    print_failure(told)
    return told.exit_code
