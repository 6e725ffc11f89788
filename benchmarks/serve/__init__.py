"""The two sides of serving.py: decoding a token by a small Llama, in torch and in JAX."""
