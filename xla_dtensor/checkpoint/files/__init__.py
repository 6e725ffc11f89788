"""What lies on disk: records, their index, safetensors."""
