"""The rules of torch's own operations, by family; importing a file registers its rules."""
