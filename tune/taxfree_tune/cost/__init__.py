"""The cost model's machines, and the pieces that calls consist of."""
