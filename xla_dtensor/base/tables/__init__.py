"""Caches, registries, and values as parts of keys."""
