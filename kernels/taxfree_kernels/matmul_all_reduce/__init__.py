"""A matmul whose K is split over the ranks, summed on all of them."""
