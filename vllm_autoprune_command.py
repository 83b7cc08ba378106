"""The installed command: answers ``--version`` and ``--help`` without importing torch.

Importing any module of ``vllm_autoprune`` imports torch, which takes two seconds.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version


def main() -> int:
    """Run ``vllm-autoprune``; exit status 1 where a module that it needs is missing."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        from vllm_autoprune.cli.commands import SUMMARIES  # without torch too

        print("usage: vllm-autoprune [-h] [--version] COMMAND ...\n")
        print("Inspect, check, compare, search and evaluate pruning states.\n")
        for name, text in SUMMARIES.items():
            print(f"  {name:<13}{text}")
        print("\nvllm-autoprune COMMAND --help has the options of a command.")
        print("Exit status: 0 success, 1 failure, 2 wrong arguments.")
        return 0
    try:
        if sys.argv[1:] == ["--version"]:
            print(version("vllm-autoprune"))
            return 0
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
