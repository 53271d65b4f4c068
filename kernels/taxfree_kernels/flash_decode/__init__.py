"""Attention of one query token per sequence over a KV cache that is sharded by sequence."""
