"""What each kind of collective is: one class for each."""
