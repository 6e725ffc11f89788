"""Three kinds of ranks: devices of one process, threads, processes; and their collectives."""
