"""The functions and classes of ``horovod.torch``: collectives, optimizers, broadcasts of state."""
