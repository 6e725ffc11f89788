"""Attention: as one composition, in blocks, and by the platform's own kernels."""
