"""Benching: variants of problems beside the library, what dispatch runs, and the bounds."""
