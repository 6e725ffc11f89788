"""What the ranks are to one of them: its world, process sets, numbers that differ by rank."""
