"""The device ``xla``: its registration with torch, its module, generators, pinned memory."""
