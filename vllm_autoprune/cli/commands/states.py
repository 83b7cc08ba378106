"""Commands on states and their language: `list`, `show`, `diff`, `atoms`, `schema`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import WIDTH, as_json, format_paragraph, format_table, format_value
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.reference import render_page, render_proposer_text
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES, AtomCall
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.transfer import list_changes, state_document

_STATE = "file, or name of a shipped state"


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """None but ``--json``; a schema is JSON with or without it."""


def _run_list(options: argparse.Namespace) -> int:
    records: list[dict[str, Any]] = []
    for name in sorted(shipped_states()):
        policy = materialize(load_state(name))
        records.append({
            "name": name,
            "base_policy": policy.base.name,
            "budget": policy.budget,
            "exchanges": policy.quota,
            "reads_instruction": policy.reads_instruction,
            "core": policy.core,
            "digest": policy.state.digest,
        })  # fmt: skip
    if options.json:
        print(as_json(records))
        return 0
    head = ["state", "base policy", "K", "exchanges", "reads the question", "shared core"]
    rows = [
        [
            *(str(record[name]) for name in ("name", "base_policy", "budget", "exchanges")),
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


LIST = Command("list the states that ship", _no_arguments, _run_list)

_Part = dict[str, Any]
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
        **state.core.model_dump(include={"share", "cover", "strength"}),
    }  # fmt: skip
    return {
        "name": state.name,
        "digest": state.digest,
        "budget": (least, most),
        "budget_atom": _part(state.budget),
        "base_policy": _base_part(state.base_policy),
        "source": _part(state.source.tokens),
        "rank_at": state.rank_at,
        "priors": list(map(_part, state.source.priors)),
        "core": core,
        "q_e": policy.quota,
        "r_min": policy.r_min,
        "signals": [
            {**_part(call), "weight": call.weight, "share": call.weight / total}
            for call in state.scoring.signals
        ],
        "kernel": _part(state.scoring.kernel),
        "fusion": _part(state.scoring.fusion),
        "pool": list(map(_part, state.constraints.pool)),
        "partition": _part(state.constraints.partition),
        "selector": _part(state.constraints.selector),
        "reassembly": _part(state.reassembly),
        "safety": list(map(_part, state.safety)),
        "reads": sorted(policy.needs),
        "provenance": state.provenance.model_dump(mode="json"),
        "words": tuple(_describe_in_words(policy, least, most)),
    }


def _base_part(call: BasePolicyCall) -> _Part:
    parameters = call.params.model_dump(mode="json")
    return {"atom": call.name, "parameters": parameters, "doc": BASE_POLICIES[call.name].doc}


def _part(call: AtomCall) -> _Part:
    # The weight of a signal stands beside its parameters.
    parameters = call.model_dump(mode="json", exclude={"atom", "weight"})
    return {"atom": call.atom, "parameters": parameters, "doc": ATOMS.of(call).doc}


def _describe_in_words(policy: PruningPolicy, least: int, most: int) -> Iterator[str]:
    """Sentences that describe a state; ``least`` and ``most`` are the smallest and largest K."""
    state, core = policy.state, policy.state.core if policy.core else None
    k = f"{most}" if least == most else f"{least} to {most}, by its size,"
    keeps, base = f"Keeps {k} visual tokens of every image", policy.base.name
    all_core = core is not None and policy.core == policy.budget
    if core is None:
        yield f"{keeps}, starting from those that {base} picks."
    elif all_core:
        yield f"{keeps}, all chosen by {core.policy.name}."
    else:
        share = f"{policy.core}" if least == most else f"{core.share:.0%}"
        yield f"{keeps}."
        yield (
            f"{share} of them are the core, chosen by {core.policy.name} without the question; the "
            f"others, the delta, start from those that {base} picks given the core."
        )
    if policy.refines and not all_core:
        pools = ", then ".join(call.atom for call in state.constraints.pool)
        count = sum(call.weight > 0 for call in state.scoring.signals)
        yield (
            f"At most {policy.quota} of them are exchanged for candidates, so at least "
            f"{policy.r_min} stay."
        )
        yield (
            f"Quality is the {state.scoring.fusion.atom} of {count} signals; candidates come "
            f"from {pools}."
        )
    elif not all_core:
        yield "Nothing is exchanged: the base policy alone chooses."
    if state.rank_at == "merger_in":
        yield "Tokens are ranked by what enters the patch merger, before it merges them."
    if all_core or not policy.reads_instruction:
        yield "It does not read the instruction, so all questions on one image share its KV cache."
    elif policy.core:
        yield (
            "Only the delta reads the instruction: questions on one image share the KV cache of "
            "its core."
        )
    else:
        yield (
            "It reads the instruction, so two questions on one image may keep different tokens and "
            "share no KV cache."
        )
    if not policy.falls_back and not all_core:
        yield "If it fails at run time, it does not fall back to the base policy's selection."


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", help=_STATE)
    parser.add_argument("--budget", type=int, help="show it at this K instead of its own")


def _run_show(options: argparse.Namespace) -> int:
    description = describe(load_state(options.state), options.budget)
    print(as_json(description) if options.json else _format_description(description))
    return 0


def _format_description(described: Mapping[str, Any]) -> str:
    least, most = described["budget"]
    budget = [f"K = {most}" if least == most else f"K = {least} to {most}"]
    rows = [_row("base policy", described["base_policy"]),
            _row("budget", described["budget_atom"], *budget)]  # fmt: skip
    if core := described["core"]:
        tokens = f"K_c = {core['tokens']}"
        numbers = [f"{name} = {core[name]}" for name in ("share", "cover", "strength")]
        rows.append(_row("core", core["policy"], tokens, *numbers))
    rows.append(_row("source", described["source"]))
    rows += [_row("prior", part) for part in described["priors"]]
    rows += [_row(name, described[name]) for name in ("kernel", "fusion")]
    rows += [_row("  then" if i else "pool", part) for i, part in enumerate(described["pool"])]
    rows.append(_row("partition", described["partition"]))
    quota = f"q_e = {described['q_e']}, r_min = {described['r_min']} at this K"
    rows += [
        ["selector", described["selector"]["atom"], quota],
        _row("reassembly", described["reassembly"]),
        ["safety", ", ".join(part["atom"] for part in described["safety"]), ""],
        ["reads", ", ".join(("features", *described["reads"])), ""],
    ]
    signals = [
        [signal["atom"], f"{signal['weight']:g}", f"{signal['share']:.0%}",
         *_row("", signal)[2:], signal["doc"]]
        for signal in described["signals"]
    ]  # fmt: skip
    provenance = [
        [key, format_value(value)]
        for key, value in described["provenance"].items()
        if value not in ("", None, {})
    ]
    nothing = "No provenance: the state does not say where it comes from or what was measured."
    head = ["signal", "weight", "share", "parameters", "what it measures"]
    return "\n\n".join([
        f"{described['name']}  (digest {described['digest'][:12]})",
        format_paragraph(" ".join(described["words"])),
        format_table(["", "what", "parameters"], rows, wrap=WIDTH),
        format_table(head, signals, "<>><<", wrap=WIDTH + 40),
        format_table(["provenance", ""], provenance, wrap=WIDTH) if provenance else nothing,
    ])  # fmt: skip


def _row(name: str, part: _Part, *more: str) -> list[str]:
    parameters = [f"{k} = {format_value(v)}" for k, v in part["parameters"].items()]
    return [name, part["atom"], ", ".join([*more, *parameters]) or "-"]


SHOW = Command("describe a state in words and as a table", _show_arguments, _run_show)


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help=_STATE)
    parser.add_argument("second", help=_STATE)


def _run_diff(options: argparse.Namespace) -> int:
    before, after = load_state(options.first), load_state(options.second)
    # With default values written out, which are no difference.
    changes = list_changes(state_document(before), state_document(after))
    same = before.digest == after.digest
    if options.json:
        record = {
            "digests": (before.digest, after.digest),
            "changes": [dataclasses.asdict(change) for change in changes],
            "same_behaviour": same,
        }
        print(as_json(record))
        return 0
    verdict = f"digests differ: {before.digest[:12]} and {after.digest[:12]}"
    if same:
        verdict = f"same digest {before.digest[:12]}: both keep the same tokens"
    rows = [
        [
            change.where,
            "-" if change.kind == "added" else format_value(change.before),
            "-" if change.kind == "removed" else format_value(change.after),
        ]
        for change in changes
    ]
    table = format_table(["field", options.first, options.second], rows, wrap=WIDTH)
    print(f"{verdict}\n\n{table}" if changes else f"{verdict}\nno field differs")
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
    atoms = [ATOMS[name] for name in ATOMS.names(options.group)]
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
            for atom in atoms
        ]
        print(as_json(records))
        return 0
    rows = [
        [atom.group, atom.name, atom.origin, ", ".join(sorted(atom.needs)) or "-", atom.doc]
        for atom in atoms
    ]
    print(format_table(["group", "atom", "origin", "reads", "what it does"], rows, wrap=WIDTH + 60))
    extensions = sum(atom.origin == "extension" for atom in atoms)
    print(f"\n{len(atoms) - extensions} atoms of the paper's language, {extensions} extensions")
    return 0


ATOMS_LIST = Command("list the atoms of the language", _atoms_arguments, _run_atoms)


def _run_schema(options: argparse.Namespace) -> int:
    print(as_json(PruningState.model_json_schema()))
    return 0


SCHEMA = Command("print the JSON Schema of a state", _no_arguments, _run_schema)
