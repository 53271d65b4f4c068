"""Symmetric memory over which ranks exchange tiles: one interface, one module per provider."""
