"""Training steps for devices that aren't here, in torch and in JAX, for `pod_llama.py`."""
