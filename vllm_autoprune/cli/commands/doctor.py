"""`doctor`: in one screen, whether this installation can serve.

Knows nothing about what is looked at.
"""

from __future__ import annotations

import argparse
import dataclasses

from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.doctor import Finding, examine
from vllm_autoprune.cli.render import WIDTH, as_json, table


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text-tower", metavar="PATH|HF_ID", help="CLIP checkpoint that is to be served with"
    )


def _run(options: argparse.Namespace) -> int:
    found = examine(options.text_tower)
    able = all(finding.status != "fail" for finding in found)
    if options.json:
        said = [dataclasses.asdict(finding) for finding in found]
        print(as_json({"can_serve": able, "findings": said}))
    else:
        print(_told(found))
        print("\nThis installation can serve." if able else "\nThis installation cannot serve yet.")
    return 0 if able else 1


def _told(found: tuple[Finding, ...]) -> str:
    rows = [[f.status, f.what, f"{f.detail} -> {f.fix}" if f.fix else f.detail] for f in found]
    return table(["", "looked at", "found"], rows, wrap=WIDTH)


COMMAND = Command("tell in one screen whether this installation can serve", _arguments, _run)
