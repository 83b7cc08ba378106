"""Commands on states and their language: `list`, `show`, `diff`, `atoms`, `schema`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import WIDTH, as_json, format_paragraph, format_table, format_value
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.reference import render_page, render_proposer_text
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES, AtomCall
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.transfer import list_changes, state_document


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """None but ``--json``; a schema is JSON with or without it."""


def _run_list(options: argparse.Namespace) -> int:
    records = [_record(name) for name in sorted(shipped_states())]
    if options.json:
        print(as_json(records))
        return 0
    head = ["state", "base policy", "K", "exchanges", "reads the question", "shared core"]
    rows = [
        [
            str(record["name"]),
            str(record["base_policy"]),
            str(record["budget"]),
            str(record["exchanges"]),
            "yes" if record["reads_instruction"] else "no",
            f"{record['core']} of K" if record["core"] else "-",
        ]
        for record in records
    ]
    print(format_table(head, rows, "<<>><<"))
    print(
        f"\n{len(records)} states. K is each state's own; --autoprune-budget serves another one. "
        "More: vllm-autoprune show NAME"
    )
    return 0


def _record(name: str) -> dict[str, object]:
    policy = materialize(load_state(name))
    return {
        "name": name,
        "base_policy": policy.base.name,
        "budget": policy.budget,
        "exchanges": policy.quota,
        "reads_instruction": policy.reads_instruction,
        "core": policy.core,
        "digest": policy.state.digest,
    }


LIST = Command("list the states that ship", _no_arguments, _run_list)


Part = dict[str, Any]
"""An atom or base policy as a state uses it: ``atom``, ``parameters``, ``doc``."""


def describe(state: PruningState, budget: int | None = None) -> dict[str, Any]:
    """Fields of a state at K, by default its own, and sentences; what `show --json` prints.

    ``budget`` is the smallest and largest K of an image, ``reads`` the inputs beyond features.
    Raises :class:`BudgetError` for a wrong K.
    """
    policy = materialize(state, budget)
    least, most = state.budget.range() if policy.varies else (policy.budget, policy.budget)
    total = sum(call.weight for call in state.scoring.signals) or 1.0
    core = None if state.core is None else {
        "tokens": policy.core,
        "policy": _base_part(state.core.policy),
        "share": state.core.share,
        "cover": state.core.cover,
        "strength": state.core.strength,
    }  # fmt: skip
    return {
        "name": state.name,
        "digest": state.digest,
        "budget": (least, most),
        "budget_atom": _part(state.budget),
        "base_policy": _base_part(state.base_policy),
        "source": _part(state.source.tokens),
        "rank_at": state.rank_at,
        "priors": [_part(call) for call in state.source.priors],
        "core": core,
        "q_e": policy.quota,
        "r_min": policy.r_min,
        "signals": [
            {
                **_part(call, without=("weight",)),
                "weight": call.weight,
                "share": call.weight / total,
            }
            for call in state.scoring.signals
        ],
        "kernel": _part(state.scoring.kernel),
        "fusion": _part(state.scoring.fusion),
        "pool": [_part(call) for call in state.constraints.pool],
        "partition": _part(state.constraints.partition),
        "selector": _part(state.constraints.selector),
        "reassembly": _part(state.reassembly),
        "safety": [_part(call) for call in state.safety],
        "reads": sorted(policy.needs),
        "provenance": state.provenance.model_dump(mode="json"),
        "words": _describe_in_words(policy, least, most),
    }


def _base_part(call: BasePolicyCall) -> Part:
    parameters = call.params.model_dump(mode="json")
    return {"atom": call.name, "parameters": parameters, "doc": BASE_POLICIES[call.name].doc}


def _part(call: AtomCall, without: tuple[str, ...] = ()) -> Part:
    parameters = call.model_dump(mode="json", exclude={"atom", *without})
    return {"atom": call.atom, "parameters": parameters, "doc": ATOMS.of(call).doc}


_RANKED_BEFORE = "Tokens are ranked by what enters the patch merger, before it merges them."
_SHARES_ALL = "It does not read the instruction, so all questions on one image share its KV cache."


def _describe_in_words(policy: PruningPolicy, least: int, most: int) -> tuple[str, ...]:
    """Sentences that describe a state; ``least`` and ``most`` are the smallest and largest K."""
    state = policy.state
    k = f"{most}" if least == most else f"{least} to {most}, by its size,"
    base = policy.base.name
    ranking = [_RANKED_BEFORE] if state.rank_at == "merger_in" else []
    sentences = [f"Keeps {k} visual tokens of every image, starting from those that {base} picks."]
    if state.core is not None and policy.core:
        of = state.core.policy.name
        if policy.core == policy.budget:
            kept = f"Keeps {k} visual tokens of every image, all chosen by {of}."
            return (kept, *ranking, _SHARES_ALL)
        share = f"{policy.core}" if least == most else f"{state.core.share:.0%}"
        sentences = [
            f"Keeps {k} visual tokens of every image.",
            f"{share} of them are the core, chosen by {of} without the question; the others, the "
            f"delta, start from those that {base} picks given the core.",
        ]
    if policy.refines:
        pools = ", then ".join(call.atom for call in state.constraints.pool)
        count = sum(call.weight > 0 for call in state.scoring.signals)
        sentences.append(
            f"At most {policy.quota} of them are exchanged for candidates, so at least "
            f"{policy.r_min} stay."
        )
        sentences.append(
            f"Quality is the {state.scoring.fusion.atom} of {count} signals; candidates come "
            f"from {pools}."
        )
    else:
        sentences.append("Nothing is exchanged: the base policy alone chooses.")
    sentences += ranking
    if policy.reads_instruction and policy.core:
        sentences.append(
            "Only the delta reads the instruction: questions on one image share the KV cache of "
            "its core."
        )
    elif policy.reads_instruction:
        sentences.append(
            "It reads the instruction, so two questions on one image may keep different tokens and "
            "share no KV cache."
        )
    else:
        sentences.append(_SHARES_ALL)
    if not policy.falls_back:
        sentences.append(
            "If it fails at run time, it does not fall back to the base policy's selection."
        )
    return tuple(sentences)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", help="file, or name of a shipped state")
    parser.add_argument("--budget", type=int, help="show it at this K instead of its own")


def _run_show(options: argparse.Namespace) -> int:
    description = describe(load_state(options.state), options.budget)
    print(as_json(description) if options.json else _format_description(description))
    return 0


def _format_description(described: Mapping[str, Any]) -> str:
    least, most = described["budget"]
    k = f"K = {most}" if least == most else f"K = {least} to {most}"
    parts = [
        _row("base policy", described["base_policy"]),
        _row("budget", described["budget_atom"], k),
    ]
    if core := described["core"]:
        numbers = {name: core[name] for name in ("share", "cover", "strength")}
        parameters = _format_parameters({**numbers, **core["policy"]["parameters"]})
        parts.append(["core", core["policy"]["atom"], f"K_c = {core['tokens']}, {parameters}"])
    parts += [
        _row("source", described["source"]),
        *(_row("prior", part) for part in described["priors"]),
        _row("kernel", described["kernel"]),
        _row("fusion", described["fusion"]),
        *(_row("  then" if i else "pool", part) for i, part in enumerate(described["pool"])),
        _row("partition", described["partition"]),
        [
            "selector",
            described["selector"]["atom"],
            f"q_e = {described['q_e']}, r_min = {described['r_min']} at this K",
        ],
        _row("reassembly", described["reassembly"]),
        ["safety", ", ".join(part["atom"] for part in described["safety"]), ""],
        ["reads", ", ".join(("features", *described["reads"])), ""],
    ]
    signals = [
        [
            signal["atom"],
            f"{signal['weight']:g}",
            f"{signal['share']:.0%}",
            _format_parameters(signal["parameters"]),
            signal["doc"],
        ]
        for signal in described["signals"]
    ]
    provenance = [
        [key, format_value(value)]
        for key, value in described["provenance"].items()
        if value not in ("", None, {})
    ]
    nothing = "No provenance: the state does not say where it comes from or what was measured."
    return "\n\n".join(
        [
            f"{described['name']}  (digest {described['digest'][:12]})",
            format_paragraph(" ".join(described["words"])),
            format_table(["", "what", "parameters"], parts, wrap=WIDTH),
            format_table(
                ["signal", "weight", "share", "parameters", "what it measures"],
                signals,
                "<>><<",
                wrap=WIDTH + 40,
            ),
            format_table(["provenance", ""], provenance, wrap=WIDTH) if provenance else nothing,
        ]
    )


def _row(name: str, part: Part, more: str = "") -> list[str]:
    parameters = _format_parameters(part["parameters"])
    return [name, part["atom"], f"{more}, {parameters}" if more else parameters]


def _format_parameters(parameters: Mapping[str, JsonValue]) -> str:
    return ", ".join(f"{k} = {format_value(v)}" for k, v in parameters.items()) or "-"


SHOW = Command("describe a state in words and as a table", _show_arguments, _run_show)


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="file, or name of a shipped state")
    parser.add_argument("second", help="file, or name of a shipped state")


def _run_diff(options: argparse.Namespace) -> int:
    first, second = load_state(options.first), load_state(options.second)
    # With default values written out, which are no difference.
    changes = list_changes(state_document(first), state_document(second))
    same = first.digest == second.digest
    if options.json:
        record = {
            "digests": (first.digest, second.digest),
            "changes": [dataclasses.asdict(change) for change in changes],
            "same_behaviour": same,
        }
        print(as_json(record))
        return 0
    short = first.digest[:12], second.digest[:12]
    verdict = f"digests differ: {short[0]} and {short[1]}"
    if same:
        verdict = f"same digest {short[0]}: both keep the same tokens"
    if not changes:
        print(f"{verdict}\nno field differs")
        return 0
    rows = [
        [
            change.where,
            "-" if change.kind == "added" else format_value(change.before),
            "-" if change.kind == "removed" else format_value(change.after),
        ]
        for change in changes
    ]
    table = format_table(["field", options.first, options.second], rows, wrap=WIDTH)
    print(f"{verdict}\n\n{table}")
    return 0


DIFF = Command("compare two states field by field", _diff_arguments, _run_diff)


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


ATOMS_LIST = Command("list the atoms of the language", _atoms_arguments, _run_atoms)


def _run_schema(options: argparse.Namespace) -> int:
    print(as_json(PruningState.model_json_schema()))
    return 0


SCHEMA = Command("print the JSON Schema of a state", _no_arguments, _run_schema)
