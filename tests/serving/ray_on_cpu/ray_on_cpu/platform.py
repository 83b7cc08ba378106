"""vLLM's CPU platform, whose workers Ray places by devices called ``GPU``."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayOnCpu(CpuPlatform):
    """The CPU platform otherwise."""

    ray_device_key = "GPU"
