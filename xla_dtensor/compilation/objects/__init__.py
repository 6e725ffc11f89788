"""Python's objects: taken apart, compared, made again, and the places that hold them."""
