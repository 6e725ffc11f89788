"""Checkpoints: ``torch.distributed.checkpoint`` of xla tensors, and what is built on it."""

from xla_dtensor.checkpoint.files.reading import FileSystemReader
from xla_dtensor.checkpoint.manager import CheckpointManager
from xla_dtensor.checkpoint.safetensors import load_safetensors, save_safetensors

__all__ = ["CheckpointManager", "FileSystemReader", "load_safetensors", "save_safetensors"]
