"""`atoms`: the atoms of the language; `schema`: the JSON Schema of a state."""

from __future__ import annotations

import argparse

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import WIDTH, as_json, format_table
from vllm_autoprune.tpdsl.reference import render_page, render_proposer_text
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES
from vllm_autoprune.tpdsl.state import PruningState


def _atoms_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", choices=list(ROLES), help="atoms of one group only")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the reference page, as on the site")
    form.add_argument(
        "--prompt", action="store_true", help="the language as an LLM proposer reads it"
    )


def _run_atoms(options: argparse.Namespace) -> int:
    if options.markdown or options.prompt:
        print(render_page() if options.markdown else render_proposer_text(), end="")
        return 0
    atoms_shown = [ATOMS[name] for name in ATOMS.names(options.group)]
    if options.json:
        records = [
            {
                "name": atom.name,
                "group": atom.group,
                "role": atom.role,
                "origin": atom.origin,
                "needs": sorted(atom.needs),
                "doc": atom.doc,
                "parameters": atom.call.model_json_schema()["properties"],
            }
            for atom in atoms_shown
        ]
        print(as_json(records))
        return 0
    rows = [
        [atom.group, atom.name, atom.origin, ", ".join(sorted(atom.needs)) or "-", atom.doc]
        for atom in atoms_shown
    ]
    print(format_table(["group", "atom", "origin", "reads", "what it does"], rows, wrap=WIDTH + 60))
    extensions = sum(atom.origin == "extension" for atom in atoms_shown)
    print(
        f"\n{len(atoms_shown) - extensions} atoms of the paper's language, {extensions} extensions"
    )
    return 0


ATOMS_COMMAND = Command("list the atoms of the language", _atoms_arguments, _run_atoms)


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments: the schema is JSON with or without ``--json``."""


def _run_schema(options: argparse.Namespace) -> int:
    print(as_json(PruningState.model_json_schema()))
    return 0


SCHEMA_COMMAND = Command("print the JSON Schema of a state", _schema_arguments, _run_schema)
