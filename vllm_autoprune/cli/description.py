"""Description of a state: its parts by field, sentences on what it does, its recorded scores."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall
from vllm_autoprune.tpdsl.state import PruningState


def format_value(value: JsonValue) -> str:
    """A JSON value in one line, strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---- parts ----


class Part(NamedTuple):
    """A base policy or an atom of a state, as it is described to users."""

    name: str
    doc: str
    parameters: dict[str, Any]
    changed: Collection[str]
    """Names of the parameters that are not at their defaults."""
    decides: bool
    """Whether it has an effect in its state."""

    def format(self, names: Collection[str]) -> str:
        """Name of the part, with those of its parameters that are in ``names``."""
        values = [
            f"{name}={format_value(value)}"
            for name, value in self.parameters.items()
            if name in names
        ]
        return f"{self.name}: {', '.join(values)}" if values else self.name


def list_parts(policy: PruningPolicy) -> dict[str, list[Part]]:
    """Base policies and atoms of a policy's state, by field of the state."""
    state = policy.state
    scoring = state.scoring
    constraints = state.constraints
    signals = sorted(scoring.signals, key=lambda signal: -signal.weight)
    fields: dict[str, Sequence[AtomCall | BasePolicyCall]] = {
        "base policy": (state.base_policy,),
        "source": (state.source.tokens,),
        "prior": state.source.priors,
        "budget": (state.budget,),
        "core": () if state.core is None else (state.core.policy,),
        "signal": signals,
        "kernel": (scoring.kernel,),
        "fusion": (scoring.fusion,),
        "pool": constraints.pool,
        "partition": (constraints.partition,),
        "selector": (constraints.selector,),
        "reassembly": (state.reassembly,),
        "safety": state.safety,
    }
    idle = _find_idle_fields(policy)
    return {
        field: [_read_part(state, field, call, field in idle) for call in calls]
        for field, calls in fields.items()
    }


def _find_idle_fields(policy: PruningPolicy) -> set[str]:
    """Fields whose parts have no effect because of the values of other fields."""
    idle = {"safety"}  # checked whether listed or not, except for the fallback
    if policy.core == policy.budget:
        idle.add("base policy")
    if not policy.reads_quality:
        idle |= {"source", "prior", "signal", "fusion"}
    if not policy.refines:
        idle |= {"kernel", "pool", "selector", "partition"}
    if "cell_cap" not in policy.state.constraints.selector.parameters():
        idle.add("partition")
    return idle


def _read_part(
    state: PruningState, field: str, call: AtomCall | BasePolicyCall, is_idle: bool
) -> Part:
    decides = not is_idle
    if isinstance(call, BasePolicyCall):
        settings: BaseModel = call.params
        name = call.name
        doc = BASE_POLICIES[call.name].doc
    else:
        settings = call
        name = call.atom
        doc = ATOMS.describe(call)
        if call.idle and not state.orders_by_quality:
            decides = False
    parameters = settings.model_dump(mode="json", exclude={"atom"})
    changed = settings.model_dump(exclude={"atom"}, exclude_defaults=True)
    if field == "core" and state.core is not None:
        parameters |= state.core.model_dump(exclude={"policy"})
        changed |= state.core.model_dump(exclude={"policy"}, exclude_defaults=True)
    if parameters.get("weight") == 0:  # a signal that is not read
        decides = False
    return Part(name, doc, parameters, changed, decides)


# ---- sentences ----


def budget_range(policy: PruningPolicy) -> tuple[int, int]:
    """Smallest and largest K of an image."""
    if policy.by_size:
        return policy.by_size.range()
    return policy.budget, policy.budget


def describe_policy(policy: PruningPolicy) -> list[str]:
    """Sentences that say what a policy keeps, exchanges and reads."""
    state = policy.state
    count = f"{policy.budget}"
    if policy.by_size:
        count = f"{policy.by_size.rule()} of the"
    if state.core is not None and policy.core == policy.budget:
        return [
            f"Keeps {count} visual tokens of every image, all chosen by "
            f"{state.core.policy.name} without the question, so all questions on one image "
            "share its KV cache."
        ]
    sentences = [
        f"Keeps {count} visual tokens of every image, starting from those that "
        f"{policy.base.name} picks."
    ]
    if state.core is not None and policy.core:
        minimum, maximum = budget_range(policy)
        share = f"{policy.core}" if minimum == maximum else f"{state.core.share:.0%}"
        sentences.append(
            f"{share} of them, the core, are chosen before by {state.core.policy.name}, "
            "without the question."
        )
    if state.cells is not None:
        sentences.append(
            f"Cells are dropped before the vision tower by the rule {state.cells}."
        )
    if state.tower is not None:
        sentences.append(
            f"Cells are dropped inside the vision tower by the rule {state.tower}."
        )
    if state.frames is not None:
        rule = f"{state.frames.tokens.rule()}, spread over its frames: {state.frames.budget}"
        sentences.append(f"Of a video it keeps {rule}.")
    return [*sentences, *_describe_choice(policy)]


def _describe_choice(policy: PruningPolicy) -> Iterator[str]:
    """Sentences on what chooses the tokens, and whether questions on one image share KV cache."""
    if policy.refines:
        count = f"At most {policy.quota}" if policy.quota < policy.budget else "All"
        yield f"{count} of them may be exchanged for candidates of higher quality."
    elif policy.state.reassembly.idle:
        yield "Nothing is exchanged: the base policy alone chooses."
    else:
        yield (
            "Nothing is exchanged: the base policy chooses, and what it drops is merged into "
            "what it keeps."
        )
    if not policy.reads_instruction:
        yield "It does not read the instruction, so all questions on one image share its KV cache."
    elif policy.core:
        yield "Questions on one image share the KV cache of its core alone."
    else:
        yield "It reads the instruction, so two questions on one image share no KV cache."


# ---- scores ----


class ScoreRow(BaseModel):
    """Scores of a state at one budget; unknown fields of a recorded row are ignored."""

    budget: int | str
    """K, or a share of N such as "N/8" if the images differ in size."""
    model: str = ""
    accuracy: float = 0.0
    less_resized: Estimate | None = None
    less_base: Estimate | None = None


def read_scores(state: PruningState) -> list[ScoreRow]:
    """Scores in a state's provenance; empty if they are not in the form of :class:`ScoreRow`.

    Scores that a search recorded are means over its budgets.
    """
    scores: dict[str, Any] = state.provenance.scores
    try:
        rows = [
            {"model": scores.get("model", ""), **row} for row in scores.get("rows", [])
        ]
        if "search_objective" in scores:
            for split in ("validation", "test"):
                # A search records fractions; rows have percent.
                gain = scores[split]["accuracy_gain"]
                row = {
                    "model": f"{split} split of the search",
                    "budget": state.budget.rule(),
                    "accuracy": 100 * scores[split]["accuracy"],
                    "less_base": {name: 100 * value for name, value in gain.items()},
                }
                rows.append(row)
        return TypeAdapter(list[ScoreRow]).validate_python(rows)
    except (TypeError, KeyError, AttributeError, ValidationError):
        # Provenance is any JSON that somebody wrote beside the state.
        return []
