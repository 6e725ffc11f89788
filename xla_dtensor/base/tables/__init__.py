"""Caches, registries, names of other packages, and values as parts of keys."""
