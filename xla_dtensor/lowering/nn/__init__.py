"""Layers: convolutions, recurrent cells, norms, losses, activations."""
