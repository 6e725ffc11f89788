"""What a step's Python can read, found by a walk and compared before each call; what it changes."""
