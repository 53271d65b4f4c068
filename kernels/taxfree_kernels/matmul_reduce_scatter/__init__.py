"""A matmul whose K is split over the ranks, each of which keeps a shard of the sum."""
