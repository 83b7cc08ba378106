"""Triton's interpreter as a GPU is: programs that wait for each other, bfloat16 that is rounded.

The interpreter runs the programs of a launch one after another, so that one that waits for the
others waits for ever; and it cuts float32 off to bfloat16, where a GPU rounds to nearest even.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch


def imitate_gpu() -> None:
    """Run the programs of each launch in threads, and round bfloat16, in this process.

    The process has to have ``TRITON_INTERPRET=1``.
    """
    from triton.runtime import interpreter

    _round_bfloat16()
    present = threading.local()
    interpreter.InterpreterBuilder.grid_idx = property(
        lambda _: present.index,
        lambda _, index: setattr(present, "index", index),
    )
    sys.setswitchinterval(1e-4)  # a waiting program keeps the others from running
    interpreter.GridExecutor.__call__ = _run_together
    # One adds names to the globals of a kernel's module, the other iterates over them.
    lock = threading.RLock()
    interpreter._patch_lang = _run_one_by_one(interpreter._patch_lang, lock)
    function = interpreter.InterpretedFunction
    function.rewrite = _run_one_by_one(function.rewrite, lock)


def _run_one_by_one(
    function: Callable[..., object], lock: threading.RLock
) -> Callable[..., object]:
    """``function``, which waits until no other thread is in one with the same lock."""

    @wraps(function)
    def run(*arguments: object) -> object:
        with lock:
            return function(*arguments)

    return run


def _run_together(self: Any, *arguments: object, **options: object) -> None:
    """``GridExecutor.__call__`` for one-dimensional grids and CPU tensors, a thread per program."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    known = {name: options[name] for name in options if name in self.arg_names}
    values = inspect.getcallargs(self.fn, *arguments, **known)
    for name in values.keys() - set(self.constexprs):
        values[name] = interpreter._implicit_cvt(values[name])
    errors: list[BaseException] = []

    def run(program: int) -> None:
        builder.set_grid_idx(program, 0, 0)
        try:
            self.fn(**values)
        except BaseException as error:  # noqa: BLE001  # raised again by the caller
            errors.append(error)

    scope = interpreter._patch_lang(self.fn)
    builder.set_grid_dim(*self.grid, 1, 1)
    programs = [
        threading.Thread(target=run, args=(program,), daemon=True)
        for program in range(self.grid[0])
    ]
    for program in programs:
        program.start()
    for program in programs:
        program.join()
    scope.restore()
    if errors:
        raise errors[0]


def _round_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return convert(values, source, target, mode)
        rounded = torch.from_numpy(np.array(values, np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)

    interpreter._convert_float = convert_rounded
