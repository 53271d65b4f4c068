"""Kernels are interpreted in these tests; what compiles them does so in processes of its own."""

import os

os.environ["TRITON_INTERPRET"] = "1"
