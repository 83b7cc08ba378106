"""Sandboxed process that runs a program written by a language model.

Run by its path and with the standard library alone: it must import nothing of this package. Reads
``{"code": ..., "budget": ...}`` from standard input; writes the JSON of ``policy(budget)`` to
standard output, or the error to standard error. Exits with ``SANDBOX_UNAVAILABLE``, before it runs
anything, if the sandbox cannot be set up.

The sandbox is a seccomp filter: the process can compute and use its three open pipes, and cannot
open files or sockets, start processes or send signals.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import platform
import resource
import sys
import traceback

# Modules that programs may import have to be loaded before opening files is forbidden.
for _name in ("collections", "copy", "functools", "itertools", "math", "random", "re", "string"):
    __import__(_name)

SANDBOX_UNAVAILABLE = 3

_MEMORY = 512 * 2**20
_SECONDS = 5
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


def enter_sandbox() -> None:
    """Limit resources and system calls irreversibly; raises :class:`OSError` on failure."""
    for kind, limit in (
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_CPU, _SECONDS),
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


def _run_policy(code: str, budget: int) -> str:
    """Return value of the program's ``policy(budget)`` as JSON."""
    # Models that write JSON policies tend to use the constants of JSON in programs as well.
    names: dict[str, object] = {"__name__": _PROGRAM, "true": True, "false": False, "null": None}
    exec(compile(code, _PROGRAM, "exec"), names)
    policy = names.get("policy")
    if not callable(policy):
        raise TypeError("the program defines no function policy(budget)")
    return json.dumps(policy(budget), allow_nan=False)


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
    try:
        enter_sandbox()
    except OSError as error:
        sys.stderr.write(str(error))
        return SANDBOX_UNAVAILABLE
    output, sys.stdout = sys.stdout, io.StringIO()  # discard what the program prints
    try:
        output.write(_run_policy(request["code"], request["budget"]))
        output.flush()
    except BaseException as error:  # including SystemExit of the program
        sys.stderr.write(_describe_error(error))
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # run no exit handlers that the program registered
