"""The way every command of the benchmarks runs and ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from vllm_autoprune.cli.output import discard_output, print_text
from vllm_autoprune.errors import AutopruneError


def run_command(name: str, run: Callable[[], int | None]) -> int:
    """Run a command and return its exit status; servers that it has started are ended.

    An error is printed in one line, with status 1, and so is output that cannot be written;
    Ctrl-C and SIGTERM give status 130.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = run() or 0
        print_text("", end="")  # an error of buffered output would come only at exit
        return status
    except KeyboardInterrupt:
        print(f"{name}: stopped, no server is left running", file=sys.stderr)
        return 130
    except BrokenPipeError:
        discard_output()  # the reader has closed the pipe
        return 1
    except (AutopruneError, OSError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, OSError) and error.filename is None and error.strerror:
            # A failed write names no file.
            text = f"output cannot be written ({error.strerror}) -> make room"
        print(f"{name}: {text}", file=sys.stderr)
        return 1
