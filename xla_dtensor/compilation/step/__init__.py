"""What ``xd.compile`` returns: the step, its programs, and when it is traced again."""
