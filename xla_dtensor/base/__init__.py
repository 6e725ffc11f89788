"""What knows no tensor: keys, caches, registries, numbers, the thread's state, interrupts."""
