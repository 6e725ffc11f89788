"""What everything else rests on, and what knows nothing of it: caches."""
