"""What the user holds: which program runs, and when there is another trace."""
