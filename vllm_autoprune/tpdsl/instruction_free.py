"""The instruction-free variant of a state, for traffic that asks many questions about one image.

Knows nothing about accuracy: a variant is another policy, and its evidence is its own.

A state that reads the instruction keeps other tokens for every question, so questions on one image
share no KV blocks. Without the instruction they share all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import JsonValue

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.atom import ATOMS
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.changes import Change, changes
from vllm_autoprune.tpdsl.materialize import inputs_read
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need

INSTRUCTION_NEEDS: frozenset[Need] = frozenset({"instruction", "language"})
"""Inputs that are made of the instruction."""

NEAREST = {
    "cdpruner": ("divprune", "diversity without the relevance that conditions it"),
    "dart": ("divprune", "both keep tokens that are unlike each other"),
    "trim": ("visionzip", "saliency of the vision tower in place of relevance to the text"),
    "fastv": ("visionzip", "attention of the vision tower in place of the language model's"),
    "pyramiddrop": ("visionzip", "attention of the vision tower in place of the language model's"),
    "sparsevlm": ("visionzip", "attention of the vision tower in place of the language model's"),
}
"""Base policy that reads the instruction -> the nearest one that does not, and why it is."""


@dataclass(frozen=True, slots=True)
class InstructionFree:
    """The variant, and every field in which it differs from the state it was made from."""

    state: PruningState
    changes: tuple[Change, ...]


def instruction_free(state: PruningState, name: str | None = None) -> InstructionFree:
    """The state with the same budget, pool, quota and reassembly, reading no instruction.

    Signals that read it are dropped; the others keep their weights, for only their ratios matter.
    Raises :class:`StateError` where a part that has no substitute reads it.
    """
    before: dict[str, JsonValue] = state.model_dump(mode="json")
    after: dict[str, JsonValue] = state.model_dump(mode="json")
    policy = state.base_policy.name
    why = {"/name": "tells them apart"}
    if BASE_POLICIES[policy].needs & INSTRUCTION_NEEDS:
        other, why["/base_policy"] = NEAREST[policy]
        after["base_policy"] = {"name": other, "params": {}}
    scoring = after["scoring"]
    assert isinstance(scoring, dict)
    kept: list[JsonValue] = [
        call.model_dump(mode="json")
        for call in state.scoring.signals
        if not ATOMS.of(call).needs_of(call) & INSTRUCTION_NEEDS
    ]
    # A state that scores by relevance alone is left with what the vision tower looks at.
    scoring["signals"] = kept or [{"atom": "attention_proxy_saliency"}]
    why["/scoring/signals"] = "reads the instruction"
    after["name"] = name or f"{state.name}-instruction-free"[-128:]
    after["provenance"] = {
        "found_by": state.provenance.found_by,
        "notes": f"Instruction-free variant of {state.name} ({state.digest[:12]}).",
    }
    why["/provenance"] = "what was measured on the other state does not speak for this one"
    made = PruningState.model_validate(after)
    _refuse_readers(made)
    return InstructionFree(
        made,
        tuple(
            replace(change, why=_reason(change.where, why))
            for change in changes(before, made.model_dump(mode="json"))
        ),
    )


def _reason(where: str, why: dict[str, str]) -> str:
    return next((reason for start, reason in why.items() if where.startswith(start)), "")


def _refuse_readers(state: PruningState) -> None:
    """A part beside base policy and signals that still reads the instruction is an error."""
    if not inputs_read(state, exchange=True) & INSTRUCTION_NEEDS:
        return
    parts = {
        "/constraints/selector": state.constraints.selector,
        "/reassembly": state.reassembly,
    }
    readers = [
        Problem(where, f"{call.atom!r} reads the instruction", "choose an atom that does not")
        for where, call in parts.items()
        if ATOMS.of(call).needs_of(call) & INSTRUCTION_NEEDS
    ]
    unnamed = Problem("", "a part of it reads the instruction", "take that part out")
    raise StateError(f"instruction-free variant of state {state.name}", readers or [unnamed])
