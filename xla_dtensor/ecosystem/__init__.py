"""Libraries built on torch: what each needs to work with xla tensors; the core knows none of them.

Each has a file or a folder here, whose `install` replaces something of the library's once the
library is imported.
"""

from xla_dtensor.ecosystem import (
    accelerate,
    huggingface_hub,
    ignite,
    lightning,
    sentence_transformers,
    spmd_types,
    torchvision,
    transformers,
    transformers_trainer,
)
from xla_dtensor.ecosystem.torchtitan import trainer


def install() -> None:
    """Wait for the libraries; nothing is imported here."""
    spmd_types.install()
    trainer.install()
    transformers.install()
    huggingface_hub.install()
    torchvision.install()
    accelerate.install()
    transformers_trainer.install()
    sentence_transformers.install()
    lightning.install()
    ignite.install()


__all__ = ["install"]
