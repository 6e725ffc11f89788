"""The files of checkpoints: torch's format and its metadata, the manifest, safetensors."""
