"""Entry point of the installed command: ``--version`` and ``--help`` without importing torch.

Importing any module of ``vllm_autoprune`` imports torch, which takes two seconds.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

COMMANDS = {
    "validate": "check states and run their safety check, warn where resizing images was better",
    "list": "list the states that ship",
    "show": "describe a state in words and as a table",
    "diff": "compare two states field by field",
    "atoms": "list the atoms of the language",
    "schema": "print the JSON Schema of a state",
    "materialize": "transfer a state to another budget or backbone, and record what changed",
    "explain": "draw which tokens of an image a state keeps for a question, and why",
    "cost": "print FLOPs of prefill and bytes of KV cache",
    "advise": "say which kind of state pays for your traffic, and whether pruning helps at all",
    "search": "find a state offline, with a language model, on a served model",
    "eval": "measure accuracy on your questions, and whether pruning beats resizing images",
    "doctor": "check whether this installation can serve",
    "selftest": "serve tiny models of all backbones but LLaVA-1.5 here, and check the results",
}
"""Every sub-command, in the order of the help, and what it does."""


def main() -> int:
    """Run ``vllm-autoprune``."""
    if sys.argv[1:] == ["--version"]:
        print(version("vllm-autoprune"))
        return 0
    if sys.argv[1:] in (["-h"], ["--help"]):
        print("usage: vllm-autoprune [-h] [--version] COMMAND ...\n")
        print("Inspect, check, compare, search and evaluate pruning states.\n")
        for name, text in COMMANDS.items():
            print(f"  {name:<13}{text}")
        print("\nvllm-autoprune COMMAND --help has the options of a command.")
        print("Exit status: 0 success, 1 failure, 2 wrong arguments.")
        return 0
    try:
        from vllm_autoprune.cli.main import main as run

        return run()
    except ImportError as error:
        from vllm_autoprune.errors import report_missing

        return report_missing(error)
