"""Optimizers' steps on xla tensors: each is one launch."""
