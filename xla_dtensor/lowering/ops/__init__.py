"""What tensors are made, moved and computed with, element by element."""
