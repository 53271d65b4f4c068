"""The command line of taxfree: one module per command, and how results are shown."""
