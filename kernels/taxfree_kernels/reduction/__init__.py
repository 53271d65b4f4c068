"""Sums of the ranks' partial matmuls: what matmul_all_reduce and matmul_reduce_scatter share."""
