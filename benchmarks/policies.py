"""``python -m benchmarks.policies build``: the shipped states and their evidence.

Most states are derived from ``policies/autoprune.json``, which has the structure that the paper
selected (its table of the materialized composition at K = 32). The paper prints no fusion weights;
the weights are ours. Evidence is accuracy on all yardsticks, from the rows of ``docs/data``, in
the provenance of a state's file.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common.command import run_command
from benchmarks.yardsticks.examples import CHECKPOINTS, weights_digest
from benchmarks.yardsticks.questions import Model
from vllm_autoprune import PruningState, load_state, materialize
from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.report import Table
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE
from vllm_autoprune.tpdsl.transfer import instruction_free, transfer

POLICIES = Path(__file__).resolve().parents[1] / "policies"
SOURCE = "autoprune"

FOUND_ON_TWO = "pivoted_qr-searched"
"""State that a search of two models found, with a language model."""
FREE = "pivoted_qr-searched-free"
"""As that one, of candidates that do not read the question."""

SEARCH_RESULTS: Mapping[str, str] = {
    "minillava": "mini-LLaVA",
    "minillava-split": "mini-LLaVA",
    "miniqwen": "mini-Qwen3-VL",
    FOUND_ON_TWO: "mini-LLaVA and mini-Qwen3-VL",
    FREE: "mini-LLaVA and mini-Qwen3-VL",
}
"""States that a search produced, and the models on which it measured them. Like the source, they
are read from ``policies/``."""

_BUDGETS: Mapping[str, Sequence[int]] = {
    "llava-1.5-7b": (16, 32, 64, 128),
    "llava-next-7b": (160, 320, 640),
    "qwen2.5-vl-7b": (32, 64, 128, 256),
}
"""The budgets and backbones for which the paper reports the selected state."""

QUOTAS = (0, 1, 2, 4, 8, 16, 32)
"""The paper's values of q_e at K = 32."""
_SWEEP = "ablation-quota-"
"""Names of the states of this sweep, without q_e."""

_FRAMES: Mapping[str, Mapping[str, object]] = {
    "echoprune": {"budget": "global", "low": 0, "first": "quota"},
    "evs": {"budget": "global", "low": 0, "first": "whole"},
    "vcast": {"budget": "curvature"},
    "vidcom2": {"budget": "uniqueness"},
}
"""How methods for videos spread their tokens over the frames of a video, as published."""

_PACKED = "Kept tokens are packed, as published."
"""Note of states that reproduce the paper; all other states have kept tokens at true positions."""

_PUBLISHED_BY = (
    "The authors of the method; "
    "parameters as they published them where nothing else is said."
)
"""Provenance of states of a base policy."""

_YARDSTICKS: Mapping[str, Model] = {
    "mini-LLaVA": "minillava",
    "mini-Qwen3-VL": "miniqwen",
    "mini-InternVL": "miniintern",
    "mini-Gemma": "minigemma",
}
"""The yardsticks by their names in the data."""

OURS = ("norm", "pivoted_qr")
"""Base policies that nobody published as pruning methods."""

READING = "pivoted_qr-relevance"
"""Pivoted QR that reads the question."""
SPLIT = "pivoted_qr-split"
"""Pivoted QR of which half of K is a core that reads no question."""

_RESIZED = "resized"
"""The name of the resize control in the data."""

_ACCURACY = POLICIES.with_name("docs") / "data/accuracy.csv"
_SHOWN = "N/8"
"""K on the page of shipped states, as in `vllm-autoprune list`."""
_EVALUATED_ON = (
    "the small models of the repository with transformers, test split, every kind of question; "
    "`python -m benchmarks.accuracy.yardsticks`"
)
_LINE_WIDTH = 96

_JsonObject = dict[str, Any]

# Placeholder for states that never score, because the schema requires one signal.
_UNUSED_SCORING: _JsonObject = {
    "signals": [{"atom": "visual_token_norm_saliency", "weight": 0.0}],
    "kernel": {"atom": "pairwise_cosine_kernel"},
    "fusion": {"atom": "weighted_product_fusion"},
}


def _derive_state(
    source: PruningState,
    name: str,
    notes: str,
    changes: _JsonObject,
    found_by: str | None = None,
) -> PruningState:
    """Change a copy of ``source`` that has true positions; ``found_by`` None keeps the source's."""
    found_by = found_by or source.provenance.found_by
    provenance: _JsonObject = {"found_by": found_by, "notes": notes}
    changes = {"positions": "true", "provenance": provenance, **changes}
    return load_state({**json.loads(source.dumps()), "name": name, **changes})


def _select_alone(policy: str) -> _JsonObject:
    """Fields of a state whose base policy alone selects: nothing is exchanged or merged."""
    return {
        "base_policy": {"name": policy, "params": {}},
        "scoring": _UNUSED_SCORING,
        "reassembly": {"atom": "mean_residual"},
        "constraints": {
            "pool": [{"atom": "quality_pool_builder"}],
            "selector": {"atom": "reference_strict_preservation_selector"},
        },
    }


def _transfer_source(source: PruningState) -> Iterator[PruningState]:
    """States for the paper's other backbones and budgets."""
    for backbone, budgets in _BUDGETS.items():
        for budget in budgets:
            name = f"{SOURCE}-{backbone}-k{budget}"
            yield transfer(source, budget, BACKBONE_SHAPES[backbone], name)[0]


def _build_base_policies(source: PruningState) -> Iterator[PruningState]:
    """A state for each base policy alone."""
    for name, policy in BASE_POLICIES.items():
        notes = f"The base policy {name} alone. {policy.doc}"
        changes = _select_alone(name)
        if name in _FRAMES:
            changes["frames"] = dict(_FRAMES[name])
        author = "This project." if name in OURS else _PUBLISHED_BY
        yield _derive_state(source, name, notes, changes, author)


def _build_for_videos(states: Sequence[PruningState]) -> Iterator[PruningState]:
    """Forms of states that prune videos too: the base policy keeps as many tokens of each frame."""
    for state in states:
        if state.name in (DEFAULT_STATE, "cen_divprune"):
            notes = (
                f"{state.name} for images, and for videos, of which its base policy keeps as many "
                "tokens of each frame."
            )
            found_by = state.provenance.found_by
            name = f"{state.name}-video"
            yield _derive_state(state, name, notes, {"frames": {}}, found_by)


def _sweep_quotas(source: PruningState) -> Iterator[PruningState]:
    """The paper's ablation of the exchange quota."""
    constraints = json.loads(source.dumps())["constraints"]
    for quota in QUOTAS:
        selector = {**constraints["selector"], "q_e": quota, "r_min": None}
        notes = (
            f"Sweep of the exchange quota: q_e = {quota}, r_min = K - q_e. {_PACKED}"
        )
        changes: _JsonObject = {
            "constraints": {**constraints, "selector": selector},
            "positions": "packed",
        }
        yield _derive_state(source, f"{_SWEEP}{quota}", notes, changes)


def _build_instruction_free(source: PruningState) -> PruningState:
    """The source without the question, so that all questions about an image share its KV.

    Base policies need no such variants: that of cdpruner would be divprune, and so on.
    """
    state = instruction_free(source, "instruction-free")[0]
    return state.model_copy(update={"positions": "true"})


def _build_shared_core(source: PruningState) -> PruningState:
    """A state for traffic that repeats images; nothing in it was tuned on a model."""
    core: _JsonObject = {"share": 0.5, "policy": {"name": "divprune", "params": {}}}
    return _derive_state(
        source,
        "shared-core",
        "Half of K by divprune, the same for every question about an image; the other half by "
        "cdpruner given these.",
        {**_select_alone("cdpruner"), "core": core},
        "The authors of the two methods; the split is ours.",
    )


def _build_pivoted(source: PruningState) -> Iterator[PruningState]:
    """Pivoted QR by lengths that grow with relevance: of all of K, or of the half after a core."""
    relevance = 2.0
    upon = _select_alone("pivoted_qr")
    upon["base_policy"] = {"name": "pivoted_qr", "params": {"relevance": relevance}}
    notes = f"Pivoted QR; the most relevant token counts as {1 + relevance:.0f} times as long."
    yield _derive_state(source, READING, notes, upon, "This project.")
    core = {"share": 0.5, "policy": {"name": "pivoted_qr", "params": {}}}
    notes = f"Half of K by pivoted_qr, the same for every question; the other half by {READING}."
    yield _derive_state(source, SPLIT, notes, {**upon, "core": core}, "This project.")


def _build_states(folder: Path = POLICIES) -> list[PruningState]:
    """Every shipped state, the source first; ``folder`` has the source and search results."""
    source, *results = (
        load_state(folder / f"{name}.json") for name in (SOURCE, *SEARCH_RESULTS)
    )
    alone = list(_build_base_policies(source))
    return [
        source,
        *results,
        *_transfer_source(source),
        *alone,
        *_build_for_videos([*results, *alone]),
        *_sweep_quotas(source),
        _build_instruction_free(source),
        _build_shared_core(source),
        *_build_pivoted(source),
    ]


@cache
def _read_accuracy() -> list[dict[str, str]]:
    """Rows of the accuracy table about all questions, with K as a share of N."""
    with _ACCURACY.open(encoding="utf-8", newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if not row["category"] + row["kind"]
        ]
    tokens = {row["yardstick"]: row["tokens"] for row in rows if row["name"] == "full"}
    for row in rows:
        budget = row["budget"].removeprefix("K = ")
        # The images of mini-LLaVA have one size, so that its rows have K itself.
        if budget.isdigit():
            budget = f"N/{float(tokens[row['yardstick']]) / int(budget):.0f}"
        row["budget"] = budget
    return rows


def _name_model(yardstick: str) -> str:
    """A yardstick's name with the digest of its weights."""
    return f"{yardstick} {weights_digest(CHECKPOINTS[_YARDSTICKS[yardstick]])}"


def _read_evidence(state: PruningState) -> _JsonObject:
    """What was measured of a state on the yardsticks; empty if nothing was.

    Figures are in per cent: ``resized`` is the resize control on the same questions,
    ``less_resized`` the state minus the control.
    """
    rows = _read_accuracy()
    resized = {
        (row["yardstick"], row["budget"]): float(row["accuracy"])
        for row in rows
        if row["name"] == _RESIZED
    }
    measured: list[_JsonObject] = [
        {
            "model": _name_model(row["yardstick"]),
            "questions": int(row["questions"]),
            "budget": row["budget"],
            "accuracy": float(row["accuracy"]),
            "resized": resized[row["yardstick"], row["budget"]],
            "less_resized": {
                "value": float(row["less_resized"]),
                "low": float(row["less_resized_low"]),
                "high": float(row["less_resized_high"]),
            },
        }
        for row in rows
        if row["name"] == state.name and row["digest"] == state.digest[:12]
    ]
    return {"rows": measured} if measured else {}


def _format_json(value: object, indent: int = 0, key: str = "") -> str:
    """Indented JSON; a list or an object that fits on one line is written on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    lead = f"{json.dumps(key, ensure_ascii=False)}: " if key else ""
    fits = indent > 0 and indent + len(lead) + len(flat) < _LINE_WIDTH
    if not isinstance(value, dict | list) or not value or fits:
        return lead + flat
    pairs = value.items() if isinstance(value, dict) else (("", item) for item in value)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(
        " " * (indent + 2) + _format_json(item, indent + 2, name)
        for name, item in pairs
    )
    return f"{lead}{begin}\n{lines}\n{' ' * indent}{end}"


def _build(folder: Path) -> None:
    """Write every shipped state and delete the files of states that no longer exist."""
    states = {f"{state.name}.json": state for state in _build_states(folder)}
    for state in states.values():
        _write_state(state, folder, _read_evidence(state))
    for path in folder.glob("*.json"):
        if path.name not in states:
            path.unlink()
    print(f"{len(states)} states in {folder.name}/")


def _write_state(state: PruningState, folder: Path, evidence: _JsonObject) -> None:
    """Write a state with all of its defaults, so that later releases serve the same policy.

    Evidence goes into the provenance, which is outside the digest.
    """
    if evidence:
        changes = {"evaluated_on": _EVALUATED_ON, "scores": evidence}
        provenance = state.provenance.model_copy(update=changes)
        state = state.model_copy(update={"provenance": provenance})
    path = folder / f"{state.name}.json"
    # If a search wrote the same state in another form, that form stays.
    if not path.exists() or load_state(path) != state:
        path.write_text(
            _format_json(json.loads(state.dumps())) + "\n", encoding="utf-8"
        )


def as_markdown() -> str:
    """One row per state; transferred states behave as their source, and share its row."""
    states = _build_states()
    accuracy = {
        (row["name"], row["yardstick"]): float(row["accuracy"])
        for row in _read_accuracy()
        if row["budget"] == _SHOWN
    }
    described = {_RESIZED: "no policy: all tokens pooled to K cells"}
    described |= {
        s.name: _describe(s)
        for s in states
        if not s.name.startswith((f"{SOURCE}-", _SWEEP))
    }
    rows = []
    for name, text in described.items():
        figures = (accuracy.get((name, model)) for model in _YARDSTICKS)
        cells = ("-" if figure is None else f"{figure:.1f}" for figure in figures)
        rows.append((name if name == _RESIZED else f"`{name}`", text, *cells))
    table = Table("", ("state", "what it is", *_YARDSTICKS), rows, "--rrrr").markdown()
    sweep = [f"`{state.name}`" for state in states if state.name.startswith(_SWEEP)]
    transferred = [
        f"`{state.name}`" for state in states if state.name.startswith(f"{SOURCE}-")
    ]
    return (
        f"{table}\n\nPer cent right at K = {_SHOWN} (-: not measured). `{SOURCE}` for the budgets "
        f"and backbones of the paper: {', '.join(transferred)}; with other q_e: "
        f"{', '.join(sweep)}.\n"
    )


def _describe(state: PruningState) -> str:
    policy = materialize(state)
    name = state.name
    base = policy.base.name
    question_free = "" if policy.reads_instruction else ", no instruction"
    if name in BASE_POLICIES:
        return f"base policy{question_free}"
    if name == SOURCE:
        return f"the paper's released policy: {base}, {policy.quota} tokens exchanged"
    if name in SEARCH_RESULTS:
        core = state.core
        shared = f", {core.share:.0%} of K the same for every question" if core else ""
        return f"found by a search on {SEARCH_RESULTS[name]}, upon {base}{shared}{question_free}"
    if name == "instruction-free":
        return f"`{SOURCE}` upon {base}, which reads no instruction"
    return state.provenance.notes.removesuffix(_PACKED).rstrip(". ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit status, 1 after an error."""
    return run_command("policies", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    parser = CommandParser(
        prog="python -m benchmarks.policies",
        description="Build the shipped states and their evidence.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="write every state with what was measured of it")
    parser.parse_args(arguments)
    _build(POLICIES)


if __name__ == "__main__":
    raise SystemExit(main())
