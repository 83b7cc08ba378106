"""`schema`: the JSON Schema of a state.

Knows nothing about its contents.
"""

from __future__ import annotations

import argparse

from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.render import as_json
from vllm_autoprune.tpdsl.states.state import PruningState


def _arguments(parser: argparse.ArgumentParser) -> None:
    """None: the schema is JSON with or without `--json`."""


def _run(options: argparse.Namespace) -> int:
    print(as_json(PruningState.model_json_schema()))
    return 0


COMMAND = Command("print the JSON Schema of a state", _arguments, _run)
