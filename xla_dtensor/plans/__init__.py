"""What a call is, and the plans by which calls are computed; README.md here explains it."""
