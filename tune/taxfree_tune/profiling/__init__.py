"""Profiling: where the time of one call goes."""
