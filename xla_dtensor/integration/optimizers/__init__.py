"""Optimizers' steps as one launch."""
