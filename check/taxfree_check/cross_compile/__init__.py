"""Kernels cross-compiled on a machine without their GPU: resources, and rules of the assembly."""
