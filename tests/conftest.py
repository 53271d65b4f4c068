"""Kernels are interpreted in these tests; what compiles them does so in processes of its own.

Set here, because Triton decides when a kernel is defined, and any test may be the first to import one.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
