"""What is kept on disk between processes, beside JAX's own cache of programs."""
