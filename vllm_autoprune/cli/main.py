"""Entry point of `vllm-autoprune`: one sub-command, one call, one print.

Knows nothing about what the calls do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from vllm_autoprune import AutopruneError, PruningState, __version__
from vllm_autoprune.cli.validate import Validation, validate
from vllm_autoprune.serving.support import SUPPORT, as_markdown
from vllm_autoprune.tpdsl.atom import ATOMS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 where all is well, 1 where something is not, 2 for a wrong call."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-autoprune", description=__doc__.split("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    checked = commands.add_parser("validate", help="check states and run their safety check")
    checked.add_argument("state", nargs="+", help="file, or name of a shipped state")
    checked.add_argument("--budget", type=int, help="check at this K instead of the state's own")
    checked.set_defaults(run=_validate)

    schema = commands.add_parser("schema", help="print the JSON Schema of a state")
    schema.set_defaults(run=_schema)

    atoms = commands.add_parser("atoms", help="list the atoms of the language")
    atoms.set_defaults(run=_atoms)

    support = commands.add_parser("support", help="what is and is not supported")
    support.set_defaults(run=_support)

    for command in (checked, schema, atoms, support):
        command.add_argument("--json", action="store_true", help="print machine-readable output")
    return parser


def _validate(options: argparse.Namespace) -> int:
    results = [validate(source, options.budget) for source in options.state]
    if options.json:
        print(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    else:
        for result in results:
            print(_told(result))
    return 0 if all(result.valid for result in results) else 1


def _told(result: Validation) -> str:
    if not result.problems:
        head = f"{result.source}: {'valid' if result.valid else 'fails its safety check'}"
        head += f", K = {result.budget}, digest {(result.digest or '')[:12]}"
    else:
        head = f"{result.source}: {len(result.problems)} problem(s)"
    lines = [f"  {where or '/'}: {what} -> {mend}" for where, what, mend in result.problems]
    lines += [
        f"  {'ok  ' if ok else 'FAIL'} {name}: {detail}" for name, ok, detail in result.verdicts
    ]
    return "\n".join([head, *lines])


def _schema(options: argparse.Namespace) -> int:
    print(json.dumps(PruningState.model_json_schema(), indent=2))
    return 0


def _atoms(options: argparse.Namespace) -> int:
    found = [ATOMS[name] for name in ATOMS.names()]
    if options.json:
        described = [
            {
                "name": atom.name,
                "group": atom.group,
                "role": atom.role,
                "paper": atom.paper,
                "needs": sorted(atom.needs),
                "doc": atom.doc,
                "parameters": atom.call.model_json_schema()["properties"],
            }
            for atom in found
        ]
        print(json.dumps(described, indent=2))
    else:
        for atom in found:
            print(f"{atom.group:22} {atom.name:42} {atom.doc}")
    return 0


def _support(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in SUPPORT], indent=2))
    else:
        print(as_markdown(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
