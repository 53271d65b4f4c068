"""Sums of the ranks' partial matmuls: shared by matmul_all_reduce and matmul_reduce_scatter."""
