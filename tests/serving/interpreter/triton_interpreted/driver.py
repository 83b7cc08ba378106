"""Driver of the backend, which describes the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.backends import compiler, driver


class InterpretedDriver(driver.DriverBase):
    """One CPU, one stream."""

    def __init__(self) -> None:
        self.get_current_device: Callable[[], int] = lambda: 0
        self.set_current_device: Callable[[int], None] = lambda device: None
        self.get_current_stream: Callable[[int], int] = lambda device: 0

    @classmethod
    def is_active(cls) -> bool:
        """Always active."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Unused, because no kernel is compiled."""
        raise NotImplementedError(ty)

    def get_current_target(self) -> compiler.GPUTarget:
        """A generic CPU."""
        return compiler.GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Unused, because no kernel is tuned."""
        raise NotImplementedError("the interpreter is not timed")
