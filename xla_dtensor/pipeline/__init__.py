"""Pipeline parallelism: torch's schedules over stages on disjoint devices, in one process."""

from xla_dtensor.pipeline.meshes import stage_meshes
from xla_dtensor.pipeline.schedule import PipelineSchedule
from xla_dtensor.pipeline.stage import PipelineStage

__all__ = ["PipelineSchedule", "PipelineStage", "stage_meshes"]
