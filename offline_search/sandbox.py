"""Sandboxed process that runs a program written by a language model.

Run by its path and with the standard library alone: it must import nothing of this package. Reads
one request from standard input,

    {"code", "function", "calls", "seconds", "numpy"}

and writes to standard output ``READY``, once the sandbox is set up, and what the function of the
program returns to each of the calls, which are lists of arguments, as JSON; or the error to
standard error. ``numpy`` is the folder that holds the package, if the program may use it.

A program that has not ended after ``seconds`` is ended by SIGALRM. Exits with
``SANDBOX_UNAVAILABLE``, and without ``READY``, if the sandbox cannot be set up.

The sandbox is a seccomp filter: the process can compute and use its three open pipes, and cannot
open files or sockets, start processes or send signals.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import platform
import random
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

# Modules that programs may import have to be loaded before opening files is forbidden.
for _name in ("collections", "copy", "functools", "itertools", "math", "re", "string"):
    __import__(_name)

SANDBOX_UNAVAILABLE = 3

READY = "ready\n"

_MEMORY = 512 * 2**20
_PROCESSOR_SECONDS = 5
_PROGRAM = "program"

# Machine -> (its number in audit.h, allowed system calls: read, write, memory, wait and exit).
_ALLOWED_CALLS = {
    "x86_64": (0xC000003E, (0, 1, 9, 11, 12, 15, 25, 28, 60, 202, 228, 231)),
    "aarch64": (0xC00000B7, (63, 64, 93, 94, 98, 113, 139, 214, 215, 216, 222, 233)),
}

_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF: load a word, jump where equal, return
_CALL_NUMBER, _ARCHITECTURE = 0, 4  # offsets in seccomp_data
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: EPERM
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # prctl


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jump_true", ctypes.c_ubyte),
        ("jump_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("first", ctypes.POINTER(_Instruction)))


def _enter_sandbox(seconds: float) -> None:
    """Limit time, memory and system calls irreversibly; raises :class:`OSError` on failure.

    No system call that could stop the timer or handle its signal is left afterwards.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for kind, limit in (
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_CPU, _PROCESSOR_SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ALLOWED_CALLS:
        raise OSError(f"no sandbox for {sys.platform} on {machine}")
    architecture, calls = _ALLOWED_CALLS[machine]
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _CALL_NUMBER),
        *((_JUMP_IF_EQUAL, len(calls) - index, 0, call) for index, call in enumerate(calls)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = (_Instruction * len(instructions))(*(_Instruction(*step) for step in instructions))
    library = ctypes.CDLL(None, use_errno=True)
    requests = (
        (_NO_NEW_PRIVILEGES, 1, 0),
        (_SET_SECCOMP, _FILTER, ctypes.byref(_Filter(len(instructions), program))),
    )
    for option, value, argument in requests:
        if library.prctl(option, value, argument, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel refuses the sandbox")


def _decode(value: dict[str, Any]) -> object:
    """An array in place of the object that stands for it."""
    if "array" not in value:
        return value
    import numpy as np

    data = np.frombuffer(base64.b64decode(value["array"]), value["type"])
    return data.reshape(value["shape"]).copy()


def _call(code: str, name: str, calls: Sequence[Sequence[object]]) -> list[object]:
    """What the function of that name returns to each list of arguments."""
    # Models that write JSON policies tend to use the constants of JSON in programs as well.
    names: dict[str, object] = {"__name__": _PROGRAM, "true": True, "false": False, "null": None}
    exec(compile(code, _PROGRAM, "exec"), names)
    function = names.get(name)
    if not callable(function):
        raise TypeError(f"the program defines no function {name}")
    results: list[object] = []
    for arguments in calls:
        # The same numbers for every call, so that a result does not depend on the others.
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        results.append(function(*arguments))
    return results


def _describe_error(error: BaseException) -> str:
    """Type and message of an error, with the line of the program that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _PROGRAM]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


def _main() -> int:
    """Read the request, enter the sandbox, run the program and write its output."""
    request = json.load(sys.stdin)
    if folder := request["numpy"]:
        sys.path.append(folder)
        # With the parts that it would load later, when no file can be opened.
        for name in ("numpy", "numpy.linalg", "numpy.random", "numpy.fft", "numpy.ma"):
            __import__(name)
    calls = json.loads(request["calls"], object_hook=_decode)
    try:
        _enter_sandbox(request["seconds"])
    except OSError as error:
        sys.stderr.write(str(error))
        return SANDBOX_UNAVAILABLE
    output, sys.stdout = sys.stdout, io.StringIO()  # discard what the program prints
    output.write(READY)
    output.flush()
    try:
        results = _call(request["code"], request["function"], calls)
        # Indices are often an array, a range, or numbers of numpy.
        output.write(json.dumps(results, allow_nan=False, default=lambda value: (
            value.tolist() if hasattr(value, "tolist") else list(value)
        )))  # fmt: skip
        output.flush()
    except BaseException as error:  # including SystemExit of the program
        sys.stderr.write(_describe_error(error))
        return 1
    return 0


if __name__ == "__main__":
    exit_code = _main()
    sys.stderr.flush()
    os._exit(exit_code)  # run no exit handlers that the program registered
