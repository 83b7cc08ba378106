"""Entry point of the installed command: answers ``--version`` without importing torch.

Importing any module of ``vllm_autoprune`` imports torch, which takes two seconds.
"""

from __future__ import annotations

import sys
from importlib.metadata import version


def main() -> int:
    """Run ``vllm-autoprune``."""
    if sys.argv[1:] == ["--version"]:
        print(version("vllm-autoprune"))
        return 0
    if sys.argv[1:] in (["-h"], ["--help"]):
        from vllm_autoprune.cli.commands import format_help  # without torch too

        print(format_help())
        return 0
    try:
        from vllm_autoprune.cli.main import main as run

        return run()
    except ImportError as error:
        from vllm_autoprune.errors import report_missing

        return report_missing(error)
