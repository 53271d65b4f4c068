"""Steps of the paper on the way to fused kernels: the fastest nowhere, not searched."""
