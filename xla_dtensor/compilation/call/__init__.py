"""One call of a step: its arguments, and where inputs come from."""
