"""torchtitan's trainer on xla meshes: ``python -m xla_dtensor.torchtitan`` with its arguments."""
