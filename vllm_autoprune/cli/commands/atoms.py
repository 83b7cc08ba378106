"""`atoms`: the atoms of the language, from the registry.

Knows nothing about any of them.
"""

from __future__ import annotations

import argparse

from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.render import WIDTH, as_json, table
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES
from vllm_autoprune.tpdsl.states.catalogue import render_page, render_proposer_text


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", choices=list(ROLES), help="atoms of one group only")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the reference page, docs/atoms.md")
    form.add_argument(
        "--prompt", action="store_true", help="the language as an LLM proposer reads it"
    )


def _run(options: argparse.Namespace) -> int:
    if options.markdown or options.prompt:
        print(render_page() if options.markdown else render_proposer_text(), end="")
        return 0
    found = [ATOMS[name] for name in ATOMS.names(options.group)]
    if options.json:
        described = [
            {
                "name": atom.name,
                "group": atom.group,
                "role": atom.role,
                "origin": atom.origin,
                "needs": sorted(atom.needs),
                "doc": atom.doc,
                "parameters": atom.call.model_json_schema()["properties"],
            }
            for atom in found
        ]
        print(as_json(described))
        return 0
    rows = [
        [atom.group, atom.name, atom.origin, ", ".join(sorted(atom.needs)) or "-", atom.doc]
        for atom in found
    ]
    print(table(["group", "atom", "origin", "reads", "what it does"], rows, wrap=WIDTH + 60))
    extensions = sum(atom.origin == "extension" for atom in found)
    print(f"\n{len(found) - extensions} atoms of the paper's language, {extensions} extensions")
    return 0


COMMAND = Command("list the atoms of the language", _arguments, _run)
