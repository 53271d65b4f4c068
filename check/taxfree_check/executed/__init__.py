"""Compiled AMD kernels, executed instruction by instruction on a CPU.

:func:`taxfree_check.executed.run.run` runs a variant on all ranks and compares its results.
"""
