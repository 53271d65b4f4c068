"""Tuning: what is tried, in which order, and what wins."""
