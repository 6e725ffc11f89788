"""How something of torch's or of a library's is replaced by our own, and who has called it."""
