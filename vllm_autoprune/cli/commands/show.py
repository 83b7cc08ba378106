"""`show`: one state in words and as a table; `diff`: two states, field by field."""

from __future__ import annotations

import argparse
import dataclasses

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import WIDTH, as_json, format_paragraph, format_table, format_value
from vllm_autoprune.report.describe import Comparison, Description, Parameters, compare, describe
from vllm_autoprune.tpdsl.loading import load_state


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", help="file, or name of a shipped state")
    parser.add_argument("--budget", type=int, help="show it at this K instead of its own")


def _run_show(options: argparse.Namespace) -> int:
    description = describe(load_state(options.state), options.budget)
    print(
        as_json(dataclasses.asdict(description))
        if options.json
        else _format_description(description)
    )
    return 0


def _format_description(description: Description) -> str:
    blocks = [
        f"{description.name}  (digest {description.digest[:12]})",
        format_paragraph(" ".join(description.words)),
        format_table(["", "what", "parameters"], _description_rows(description), wrap=WIDTH),
        format_table(
            ["signal", "weight", "share", "parameters", "what it measures"],
            [
                [s.atom, f"{s.weight:g}", f"{s.share:.0%}", _format_parameters(s.parameters), s.doc]
                for s in description.signals
            ],
            "<>><<",
            wrap=WIDTH + 40,
        ),
        _format_provenance(description.provenance),
    ]
    return "\n\n".join(blocks)


def _description_rows(description: Description) -> list[list[str]]:
    pools = [
        ["pool" if i == 0 else "  then", p.atom, _format_parameters(p.parameters)]
        for i, p in enumerate(description.pool)
    ]
    return [
        [
            "base policy",
            description.base_policy.atom,
            _format_parameters(description.base_policy.parameters),
        ],
        [
            "budget",
            description.budget_atom.atom,
            _format_budget(description),
        ],
        *_core_rows(description),
        ["source", description.source.atom, _format_parameters(description.source.parameters)],
        *(["prior", part.atom, _format_parameters(part.parameters)] for part in description.priors),
        ["kernel", description.kernel.atom, _format_parameters(description.kernel.parameters)],
        ["fusion", description.fusion.atom, _format_parameters(description.fusion.parameters)],
        *pools,
        [
            "partition",
            description.partition.atom,
            _format_parameters(description.partition.parameters),
        ],
        [
            "selector",
            description.selector.atom,
            f"q_e = {description.q_e}, r_min = {description.r_min} at this K",
        ],
        [
            "reassembly",
            description.reassembly.atom,
            _format_parameters(description.reassembly.parameters),
        ],
        ["safety", ", ".join(part.atom for part in description.safety), ""],
        ["reads", ", ".join(("features", *description.reads)), ""],
    ]


def _core_rows(description: Description) -> list[list[str]]:
    core = description.core
    if core is None:
        return []
    numbers = {"share": core.share, "cover": core.cover, "strength": core.strength}
    parameters = _format_parameters({**numbers, **core.policy.parameters})
    return [["core", core.policy.atom, f"K_c = {core.tokens}, {parameters}"]]


def _format_budget(description: Description) -> str:
    least, most = description.budget
    k = f"K = {most}" if least == most else f"K = {least} to {most}"
    return f"{k}, {_format_parameters(description.budget_atom.parameters)}"


def _format_parameters(parameters: Parameters) -> str:
    return ", ".join(f"{k} = {format_value(v)}" for k, v in parameters.items()) or "-"


def _format_provenance(provenance: Parameters) -> str:
    rows = [
        [key, format_value(value)]
        for key, value in provenance.items()
        if value not in ("", None, {})
    ]
    if not rows:
        return "No provenance: the state does not say where it comes from or what was measured."
    return format_table(["provenance", ""], rows, wrap=WIDTH)


SHOW = Command("describe a state in words and as a table", _show_arguments, _run_show)


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="file, or name of a shipped state")
    parser.add_argument("second", help="file, or name of a shipped state")


def _run_diff(options: argparse.Namespace) -> int:
    comparison = compare(load_state(options.first), load_state(options.second))
    if options.json:
        print(
            as_json({**dataclasses.asdict(comparison), "same_behaviour": comparison.same_behaviour})
        )
    else:
        print(_format_comparison(comparison, options.first, options.second))
    return 0


def _format_comparison(comparison: Comparison, first: str, second: str) -> str:
    digests = [digest[:12] for digest in comparison.digests]
    verdict = f"same digest {digests[0]}: both keep the same tokens"
    if not comparison.same_behaviour:
        verdict = f"digests differ: {digests[0]} and {digests[1]}"
    if not comparison.changes:
        return f"{verdict}\nno field differs"
    rows = [
        [
            change.where,
            "-" if change.kind == "added" else format_value(change.before),
            "-" if change.kind == "removed" else format_value(change.after),
        ]
        for change in comparison.changes
    ]
    return f"{verdict}\n\n{format_table(['field', first, second], rows, wrap=WIDTH)}"


DIFF = Command("compare two states field by field", _diff_arguments, _run_diff)
