"""What reaches our dispatch below or beside autograd: composites, attention, recomputation."""
