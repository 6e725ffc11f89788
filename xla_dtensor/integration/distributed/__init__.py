"""torch.distributed: process groups, collectives, data and context parallelism."""
