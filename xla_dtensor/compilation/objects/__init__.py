"""Python objects outside of a step: taken apart, compared, rebuilt; and their containers."""
