"""Files that the command writes: whole or not at all, and errors in our own words.

Knows nothing about what is in them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from vllm_autoprune.errors import ConfigError, Problem


def write(path: Path, content: bytes) -> None:
    """Write a file in one step; raises :class:`ConfigError` where that is not possible."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise ConfigError("output", [Problem(str(path), what, "choose another place")]) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
