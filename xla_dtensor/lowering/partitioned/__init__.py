"""Writes, pads, cuts and scans in the form that XLA partitions right."""
