"""The installed command: answers ``--version`` and ``--help`` without importing torch.

Importing any module of ``vllm_autoprune`` imports torch, which takes two seconds.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version


def _help() -> str:
    """The help of all commands together."""
    from vllm_autoprune.cli.commands import SUMMARIES  # without torch too

    commands = "\n".join(f"  {name:<13}{text}" for name, text in SUMMARIES.items())
    return (
        "usage: vllm-autoprune [-h] [--version] COMMAND ...\n\n"
        "Inspect, check, compare, search and evaluate pruning states.\n\n"
        f"{commands}\n\n"
        "vllm-autoprune COMMAND --help has the options of a command.\n"
        "Exit status: 0 success, 1 failure, 2 wrong arguments."
    )


def _print(text: str) -> int:
    """Print as ``cli.output.print_text`` does, whose import takes two seconds."""
    try:
        print(text, flush=True)
    except OSError as error:
        # Else Python would try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            what = f"standard output: cannot be written ({error.strerror})"
            print(
                f"vllm-autoprune: {what} -> make room, or send it elsewhere",
                file=sys.stderr,
            )
        return 1
    return 0


def main() -> int:
    """Run ``vllm-autoprune``; exit status 1 where a module that it needs is missing."""
    try:
        if sys.argv[1:] in (["-h"], ["--help"]):
            return _print(_help())
        if sys.argv[1:] == ["--version"]:
            return _print(version("vllm-autoprune"))
        from vllm_autoprune.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while torch is imported
        print("vllm-autoprune: stopped", file=sys.stderr)
        return 130
    except ImportError as error:
        from vllm_autoprune.errors import Problem

        module = (error.name or "").partition(".")[0]
        if module in ("", "vllm_autoprune", "offline_search"):
            raise  # a fault of this package
        what = f"cannot be imported ({error})"
        if isinstance(error, ModuleNotFoundError):
            what = f"not installed for {sys.executable}"
        fix = "install vllm-autoprune into the environment that vLLM is in"
        if (
            module != "vllm-autoprune"
        ):  # no metadata of a checkout that is not installed
            fix += f", or: pip install {'pillow' if module == 'PIL' else module}"
        message = str(Problem(module, what, fix))
        if "--json" in sys.argv:
            print(
                json.dumps(
                    {"error": type(error).__name__, "message": message, "problems": []}
                )
            )
        print(f"vllm-autoprune: {message}", file=sys.stderr)
        return 1
