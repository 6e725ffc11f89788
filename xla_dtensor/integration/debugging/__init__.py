"""torch's debugging modes, profilers and observers."""
