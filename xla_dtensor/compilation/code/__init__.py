"""Analysis of Python code: the names it reads and sets, from bytecode and source; no tensors."""
