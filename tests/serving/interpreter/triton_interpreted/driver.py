"""Driver of the backend, which describes the device: one CPU, one stream."""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from .compiler import never

InterpretedDriver = type(
    "InterpretedDriver",
    (DriverBase,),
    {
        **dict.fromkeys(DriverBase.__abstractmethods__, never),
        "__init__": lambda self: None,
        "is_active": classmethod(lambda cls: True),
        "get_current_device": lambda self: 0,
        "set_current_device": lambda self, device: None,
        "get_current_stream": lambda self, device: 0,
        "get_current_target": lambda self: GPUTarget("cpu", 0, 1),
        "get_active_torch_device": lambda self: torch.device("cpu"),
    },
)
