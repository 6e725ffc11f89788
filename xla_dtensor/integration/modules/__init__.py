"""Modules: hooks on them, lazy ones, loading and saving."""
