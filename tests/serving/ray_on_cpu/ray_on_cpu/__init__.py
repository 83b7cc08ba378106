"""Entry point of the platform plugin."""


def find_platform() -> str:
    """Name of the platform's class; vLLM imports it later."""
    return "ray_on_cpu.platform.RayOnCpu"
