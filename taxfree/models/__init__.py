"""Models: PyTorch's tensor parallelism, its compiler, and Transformers run on taxfree."""
