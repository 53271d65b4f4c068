"""All-gather of a sharded A, then a matmul with this rank's own weight."""
