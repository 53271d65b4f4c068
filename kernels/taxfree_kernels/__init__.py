"""Fused multi-GPU kernels in Triton: fabrics, device functions, and one folder per operation."""
