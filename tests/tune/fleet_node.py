"""A node of a fleet as a process: `taxfree` with a short lease."""

from __future__ import annotations

from taxfree_cli.app import main
from taxfree_tune.tuning import fleet

if __name__ == "__main__":
    fleet.LEASE_S = 6
    main()
