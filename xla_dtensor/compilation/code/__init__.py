"""What Python code names, reads and runs; knows no tensor."""
