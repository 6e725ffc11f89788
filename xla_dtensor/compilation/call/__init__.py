"""One call of a compiled step: its arguments, its program's inputs, and its results."""
