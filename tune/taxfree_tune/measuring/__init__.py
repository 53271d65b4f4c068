"""Measuring: the protocol, bounds, benches, and the files of their results."""
