"""Creation, elementwise, indexing, view, random and reduction operations."""
