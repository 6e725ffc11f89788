"""Finding out which ranks there are, and starting ranks that are threads."""
