"""Tensors with as many rows as a value on the devices says, in buffers of static shapes."""
