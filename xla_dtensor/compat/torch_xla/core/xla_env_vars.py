"""Names of torch_xla's environment variables."""

PJRT_DEVICE = "PJRT_DEVICE"
CPU_NUM_DEVICES = "CPU_NUM_DEVICES"
