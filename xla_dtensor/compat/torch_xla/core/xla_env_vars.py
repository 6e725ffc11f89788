"""Names of environment variables."""

PJRT_DEVICE = "PJRT_DEVICE"
CPU_NUM_DEVICES = "CPU_NUM_DEVICES"
