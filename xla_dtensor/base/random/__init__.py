"""The random number generator of the device, and ``torch.Generator``s of it."""
