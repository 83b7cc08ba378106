"""`support`: what is and is not supported, as the README shows it.

Knows nothing about how the table came about.
"""

from __future__ import annotations

import argparse
import dataclasses

from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.render import as_json
from vllm_autoprune.serving.startup.support import BACKBONE_SUPPORT, SUPPORT, as_markdown


def _arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def _run(options: argparse.Namespace) -> int:
    if options.json:
        backbones = [dataclasses.asdict(row) for row in BACKBONE_SUPPORT]
        features = [dataclasses.asdict(row) for row in SUPPORT]
        print(as_json({"backbones": backbones, "features": features}))
    else:
        print(as_markdown(), end="")
    return 0


COMMAND = Command("print what is and is not supported", _arguments, _run)
