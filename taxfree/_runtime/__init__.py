"""Runtime: plans, the dispatcher and torch ops; private behind ``taxfree``."""
