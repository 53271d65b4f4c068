"""Attention of a prompt to itself, on one GPU."""
