"""`show`: one state in words and as a table.

Knows nothing about the meaning of its parts.
"""

from __future__ import annotations

import argparse
import dataclasses

from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.render import WIDTH, as_json, brief, paragraph, table
from vllm_autoprune.report.describe import Description, Parameters, describe
from vllm_autoprune.tpdsl.states.load import load_state


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", help="file, or name of a shipped state")
    parser.add_argument("--budget", type=int, help="show it at this K instead of its own")


def _run(options: argparse.Namespace) -> int:
    found = describe(load_state(options.state), options.budget)
    print(as_json(dataclasses.asdict(found)) if options.json else _told(found))
    return 0


def _told(found: Description) -> str:
    blocks = [
        f"{found.name}  (digest {found.digest[:12]})",
        paragraph(" ".join(found.words)),
        table(["", "what", "parameters"], _rows(found), wrap=WIDTH),
        table(
            ["signal", "weight", "share", "parameters", "what it measures"],
            [
                [s.atom, f"{s.weight:g}", f"{s.share:.0%}", _set(s.parameters), s.doc]
                for s in found.signals
            ],
            "<>><<",
            wrap=WIDTH + 40,
        ),
        _evidence(found.provenance),
    ]
    return "\n\n".join(blocks)


def _rows(found: Description) -> list[list[str]]:
    pools = [
        ["pool" if i == 0 else "  then", p.atom, _set(p.parameters)]
        for i, p in enumerate(found.pool)
    ]
    return [
        ["base policy", found.base_policy.atom, _set(found.base_policy.parameters)],
        [
            "budget",
            found.budget_atom.atom,
            _budget(found),
        ],
        ["source", found.source.atom, _set(found.source.parameters)],
        *(["prior", part.atom, _set(part.parameters)] for part in found.priors),
        ["kernel", found.kernel.atom, _set(found.kernel.parameters)],
        ["fusion", found.fusion.atom, _set(found.fusion.parameters)],
        *pools,
        ["partition", found.partition.atom, _set(found.partition.parameters)],
        ["selector", found.selector.atom, f"q_e = {found.q_e}, r_min = {found.r_min} at this K"],
        ["reassembly", found.reassembly.atom, _set(found.reassembly.parameters)],
        ["safety", ", ".join(part.atom for part in found.safety), ""],
        ["reads", ", ".join(("features", *found.reads)), ""],
    ]


def _budget(found: Description) -> str:
    least, most = found.budget
    k = f"K = {most}" if least == most else f"K = {least} to {most}"
    return f"{k}, {_set(found.budget_atom.parameters)}"


def _set(parameters: Parameters) -> str:
    return ", ".join(f"{k} = {brief(v)}" for k, v in parameters.items()) or "-"


def _evidence(provenance: Parameters) -> str:
    rows = [[key, brief(value)] for key, value in provenance.items() if value not in ("", None, {})]
    if not rows:
        return "No provenance: nothing is said of where it comes from or what was measured."
    return table(["provenance", ""], rows, wrap=WIDTH)


COMMAND = Command("tell what a state does, in words and as a table", _arguments, _run)
