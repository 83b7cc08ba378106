"""Sandboxed process that runs a program written by a language model.

Run by its path and with the standard library alone: it must import nothing of this package. Reads
one of two requests from standard input, and writes JSON to standard output, or the error to
standard error; ``READY`` comes first, once the sandbox is set up:

    {"code", "budget", "seconds"}   the return value of ``policy(budget)``
    {..., "images", "numpy"}        the indices of ``select(features, signals, K)`` of each image;
                                    ``numpy`` is the folder that holds the package

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
import operator
import os
import platform
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


# Modules that programs may import have to be loaded before opening files is forbidden.
for _name in ("collections", "copy", "functools", "itertools", "math", "random", "re", "string"):
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


def _load_function(code: str, name: str, signature: str) -> Callable[..., object]:
    """The function of that name that the program defines."""
    # Models that write JSON policies tend to use the constants of JSON in programs as well.
    names: dict[str, object] = {"__name__": _PROGRAM, "true": True, "false": False, "null": None}
    exec(compile(code, _PROGRAM, "exec"), names)
    function = names.get(name)
    if not callable(function):
        raise TypeError(f"the program defines no function {name}({signature})")
    return function


def _run_policy(code: str, budget: int) -> str:
    """Return value of the program's ``policy(budget)`` as JSON."""
    policy = _load_function(code, "policy", "budget")
    return json.dumps(policy(budget), allow_nan=False)


def _import_numpy(folder: str) -> None:
    """Import numpy with the parts that it would load later, when no file can be opened."""
    sys.path.append(folder)
    for name in ("numpy", "numpy.linalg", "numpy.random", "numpy.fft", "numpy.ma"):
        __import__(name)


def _run_selection(code: str, budget: int, images: Sequence[Mapping[str, Any]]) -> str:
    """Indices that the program's ``select(features, signals, K)`` returns for each image."""
    import random

    import numpy as np

    select = _load_function(code, "select", "features, signals, K")
    selections = []
    for image in images:
        # The same numbers for every image, so that a selection does not depend on the others.
        random.seed(0)
        np.random.seed(0)
        signals = {name: _decode_array(array) for name, array in image["signals"].items()}
        indices = select(_decode_array(image["features"]), signals, budget)
        selections.append([operator.index(index) for index in indices])  # type: ignore[attr-defined]
    return json.dumps(selections)


def _decode_array(array: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    data = np.frombuffer(base64.b64decode(array["data"]), array["type"])
    return data.reshape(array["shape"]).copy()


def _describe_error(error: BaseException) -> str:
    """Type and message of an error, with the line of the program that raised it."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == _PROGRAM
    ]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


def main() -> int:
    """Read the request, enter the sandbox, run the program and write its output."""
    request = json.load(sys.stdin)
    if "numpy" in request:
        _import_numpy(request["numpy"])
    try:
        _enter_sandbox(request["seconds"])
    except OSError as error:
        sys.stderr.write(str(error))
        return SANDBOX_UNAVAILABLE
    output, sys.stdout = sys.stdout, io.StringIO()  # discard what the program prints
    output.write(READY)
    output.flush()
    try:
        code, budget = request["code"], request["budget"]
        selects = "images" in request
        output.write(
            _run_selection(code, budget, request["images"])
            if selects
            else _run_policy(code, budget)
        )
        output.flush()
    except BaseException as error:  # including SystemExit of the program
        sys.stderr.write(_describe_error(error))
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # run no exit handlers that the program registered
