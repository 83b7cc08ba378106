"""The process in which a written program runs: locked up first, then ``policy(budget)`` as JSON.

Knows nothing about this package: it is run by its path, with the standard library alone. Reads
``{"code": ..., "budget": ...}``; writes what the program returned, or why it returned nothing to
standard error. Exits with ``UNCONFINED`` where the lock does not hold, before it runs anything.

The lock is the kernel's (seccomp): from then on the process can compute and write to what is open,
which are its three pipes. It can open no file and no socket, start nothing and signal nobody.
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

# What a program may import has to be there before files can no longer be opened.
for _name in ("collections", "copy", "functools", "itertools", "math", "random", "re", "string"):
    __import__(_name)

UNCONFINED = 3

_MEMORY = 512 * 2**20
_SECONDS = 5
_PROGRAM = "program"

# Architecture -> (its number in audit.h, calls to read, write, ask for memory, wait and end).
_CALLS = {
    "x86_64": (0xC000003E, (0, 1, 9, 11, 12, 15, 25, 28, 60, 202, 228, 231)),
    "aarch64": (0xC00000B7, (63, 64, 93, 94, 98, 113, 139, 214, 215, 216, 222, 233)),
}

_LOAD, _SAME, _RETURN = 0x20, 0x15, 0x06  # BPF: load a word, jump where equal, return
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in seccomp_data
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: EPERM
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # prctl


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("then", ctypes.c_ubyte),
        ("otherwise", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("first", ctypes.POINTER(_Instruction)))


def confine() -> None:
    """Lock this process up for good; raises :class:`OSError` where the kernel does not."""
    for kind, most in (
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_CPU, _SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _CALLS:
        raise OSError(f"no lock is known for {sys.platform} on {machine}")
    architecture, calls = _CALLS[machine]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_SAME, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *((_SAME, len(calls) - place, 0, call) for place, call in enumerate(calls)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    written = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    library = ctypes.CDLL(None, use_errno=True)
    asked = (
        (_NO_NEW_PRIVILEGES, 1, 0),
        (_SET_SECCOMP, _FILTER, ctypes.byref(_Filter(len(steps), written))),
    )
    for option, value, more in asked:
        if library.prctl(option, value, more, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel refuses to confine a process")


def _returned(code: str, budget: int) -> str:
    """What ``policy(budget)`` of a program returns, as JSON."""
    # Whoever writes policies as JSON all day writes its words in programs too.
    names: dict[str, object] = {"__name__": _PROGRAM, "true": True, "false": False, "null": None}
    exec(compile(code, _PROGRAM, "exec"), names)
    policy = names.get("policy")
    if not callable(policy):
        raise TypeError("the program defines no function policy(budget)")
    return json.dumps(policy(budget), allow_nan=False)


def _told(error: BaseException) -> str:
    """The error's kind and message, and the line of the program that it comes from."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == _PROGRAM
    ]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


def main() -> int:
    """Read, lock, run, write."""
    asked = json.load(sys.stdin)
    try:
        confine()
    except OSError as error:
        sys.stderr.write(str(error))
        return UNCONFINED
    answers, sys.stdout = sys.stdout, io.StringIO()  # what a program prints is no answer
    try:
        answers.write(_returned(asked["code"], asked["budget"]))
        answers.flush()
    except BaseException as error:  # whatever a program raises is an answer about it
        sys.stderr.write(_told(error))
        return 1
    return 0


if __name__ == "__main__":
    ended = main()
    sys.stderr.flush()
    os._exit(ended)  # nothing that a program left behind runs at exit
