"""Device functions that kernels of every operation share."""
