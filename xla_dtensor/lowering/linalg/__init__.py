"""Matrix products, decompositions, transforms."""
