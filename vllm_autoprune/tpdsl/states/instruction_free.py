"""Instruction-free variant of a state, for traffic with many questions about the same image.

A state that reads the instruction keeps different tokens for different questions, so questions
about one image cannot share KV blocks. Without the instruction they share all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import JsonValue

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    INSTRUCTION_NEEDS,
    BasePolicyCall,
)
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.states.differences import Change, list_changes
from vllm_autoprune.tpdsl.states.state import PruningState, required_inputs

NEAREST = {
    "cdpruner": ("divprune", "diversity without conditioning on relevance"),
    "dart": ("divprune", "both keep tokens that are dissimilar to each other"),
    "trim": ("visionzip", "saliency in the vision tower in place of relevance to the text"),
    "fastv": ("visionzip", "attention of the vision tower in place of the language model's"),
    "pyramiddrop": ("visionzip", "attention of the vision tower in place of the language model's"),
    "sparsevlm": ("visionzip", "attention of the vision tower in place of the language model's"),
}
"""Base policy that always reads the instruction -> the most similar one that does not, and why."""


@dataclass(frozen=True, slots=True)
class InstructionFree:
    """The variant, and every field in which it differs from the original state."""

    state: PruningState
    changes: tuple[Change, ...]


def instruction_free(state: PruningState, name: str | None = None) -> InstructionFree:
    """Variant with the same budget, pool, quota and reassembly that reads no instruction.

    Signals that read the instruction are dropped; the others keep their weights, since only the
    ratios matter. A core is dropped: questions then share all KV blocks without it, and the rest of
    the state chooses better among K tokens than among K - K_c; a state that is all core is kept.
    Raises :class:`StateError` if a part without a substitute reads it.
    """
    before: dict[str, JsonValue] = state.model_dump(mode="json")
    after: dict[str, JsonValue] = state.model_dump(mode="json")
    policy = state.base_policy.name
    why = {"/name": "distinguishes the variant from the original"}
    if state.core is not None and state.core.share < 1:
        del after["core"]
        why["/core"] = "without the instruction, questions share all KV blocks anyway"
    if BASE_POLICIES[policy].needs_of(state.base_policy.params) & INSTRUCTION_NEEDS:
        after["base_policy"], why["/base_policy"] = _question_free(state.base_policy)
    scoring = after["scoring"]
    assert isinstance(scoring, dict)
    kept: list[JsonValue] = [
        call.model_dump(mode="json")
        for call in state.scoring.signals
        if not ATOMS.of(call).needs_of(call) & INSTRUCTION_NEEDS
    ]
    # A state that scores by relevance alone falls back to attention in the vision tower.
    scoring["signals"] = kept or [{"atom": "attention_proxy_saliency"}]
    why["/scoring/signals"] = "reads the instruction"
    after["name"] = name or f"{state.name}-instruction-free"[-128:]
    after["provenance"] = {
        "found_by": state.provenance.found_by,
        "notes": f"Instruction-free variant of {state.name} ({state.digest[:12]}).",
    }
    why["/provenance"] = "scores of the original state do not apply to the variant"
    variant = PruningState.model_validate(after)
    _refuse_readers(variant)
    return InstructionFree(
        variant,
        tuple(
            replace(change, why=_reason(change.where, why))
            for change in list_changes(before, variant.model_dump(mode="json"))
        ),
    )


def _question_free(call: BasePolicyCall) -> tuple[JsonValue, str]:
    """The base policy's own form without the question, else the most similar policy; and why."""
    policy = BASE_POLICIES[call.name]
    if policy.core is not None:
        params: JsonValue = policy.question_free_params(call.params).model_dump(mode="json")
        return {
            "name": call.name,
            "params": params,
        }, "the same policy in its form that reads no question"
    other, reason = NEAREST[call.name]
    return {"name": other, "params": {}}, reason


def _reason(where: str, why: dict[str, str]) -> str:
    return next((reason for start, reason in why.items() if where.startswith(start)), "")


def _refuse_readers(state: PruningState) -> None:
    """Raise :class:`StateError` if the selector or the reassembly reads the instruction."""
    if not required_inputs(state, exchange=True) & INSTRUCTION_NEEDS:
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
    unnamed = Problem("", "a part of the state reads the instruction", "remove that part")
    raise StateError(f"instruction-free variant of state {state.name}", readers or [unnamed])
