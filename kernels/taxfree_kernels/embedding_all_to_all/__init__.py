"""Pooled rows of embedding tables, which are sharded over the ranks, for every rank's samples."""
