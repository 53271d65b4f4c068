"""`python -m taxfree` is the command `taxfree`, for launchers that start modules."""

import runpy

if __name__ == "__main__":
    # The library imports nothing of the command line.
    runpy.run_module("taxfree_cli.app", run_name="__main__", alter_sys=True)
