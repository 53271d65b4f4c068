"""The drivers' own tools, which describe GPUs without initialising them."""
