"""Moves tensors: to other layouts, between the two views, to and from the host; collectives."""
