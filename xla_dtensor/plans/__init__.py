"""What a call is, and how such calls are computed; README.md here explains it."""
