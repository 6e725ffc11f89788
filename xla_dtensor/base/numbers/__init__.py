"""Numbers of Python's that are inputs of a program, while its trace computes with them."""
