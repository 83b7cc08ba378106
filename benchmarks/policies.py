"""``python -m benchmarks.policies build | measure``: the shipped states and their evidence.

Most states are derived from ``policies/autoprune.json``, which has the structure that the paper
selected (its table of the materialized composition at K = 32). The paper prints no fusion weights;
the weights are ours. ``measure`` asks mini-LLaVA through vLLM with each state, and keeps accuracy
in the provenance of its file.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from benchmarks.yardsticks.engine import answer_questions, open_engine
from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    Example,
    aggregate,
    draw_examples,
    is_right,
    weights_digest,
)
from vllm_autoprune import PruningState, load_state, materialize
from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.evaluation.journal import RESIZED
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, estimate
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.transfer import instruction_free, transfer

POLICIES = Path(__file__).resolve().parents[1] / "policies"
SOURCE = "autoprune"

SEARCH_RESULTS: Mapping[str, str] = {
    "minillava": "mini-LLaVA",
    "minillava-split": "mini-LLaVA",
    "miniqwen": "mini-Qwen3-VL",
}
"""States that a search produced, and the model it measured them on; like the source, they are read
from ``policies/``."""

BUDGETS: Mapping[str, Sequence[int]] = {
    "llava-1.5-7b": (16, 32, 64, 128),
    "llava-next-7b": (160, 320, 640),
    "qwen2.5-vl-7b": (32, 64, 128, 256),
}
"""The budgets and backbones for which the paper reports the selected state."""

QUOTAS = (0, 1, 2, 4, 8, 16, 32)
"""The paper's values of q_e at K = 32."""

_RELEASED = (
    "The policy that the paper's authors released, number for number: AIM-ResearchLab/AutoPrune, "
    "openevolve/policies/final/autoprune_llava15_mme_k32_merge.yaml."
)
_EVALUATED_ON = (
    "the embedded mini-LLaVA through vLLM on a CPU, test split, every kind of question, "
    "greedy; K is given by the request; `python -m benchmarks.policies measure`"
)
# A quiet engine in this process, because many are started one after another.
_ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
           "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
_LINE_WIDTH = 96

JsonObject = dict[str, JsonValue]

# Scoring for a state that never scores; the schema requires one signal.
_UNUSED_SCORING: JsonObject = {
    "signals": [{"atom": "visual_token_norm_saliency", "weight": 0.0}],
    "kernel": {"atom": "pairwise_cosine_kernel"},
    "fusion": {"atom": "weighted_product_fusion"},
}


@dataclass(frozen=True)
class Entry:
    """One shipped state and the family it belongs to."""

    family: str
    state: PruningState

    @property
    def carries_evidence(self) -> bool:
        """Whether accuracy measured on mini-LLaVA belongs into the state's file.

        Not for a transferred state, which is for another backbone and another K than were measured,
        nor for one that a search found on another model: its evidence is of both yardsticks.
        """
        found_on = SEARCH_RESULTS.get(self.state.name, "mini-LLaVA")
        return self.family != "transfer" and found_on == "mini-LLaVA"


class Row(FrozenModel):
    """Accuracy at one budget, in per cent.

    ``resized`` is that of the resize control on the same questions, ``less_resized`` the state less
    the control; None where it was not measured.
    """

    budget: int
    accuracy: float
    accuracy_plus: float
    prompt_tokens: float
    resized: float | None = None
    less_resized: Estimate | None = None


class Evidence(FrozenModel):
    """Measurements of a state; ``behaviour`` is the digest of the state that was measured."""

    model: str
    questions: int
    behaviour: str
    rows: tuple[Row, ...]


def build_states(folder: Path = POLICIES) -> list[Entry]:
    """Every shipped state by family, the source first; it and search results are read."""
    source, *results = (load_state(folder / f"{name}.json") for name in (SOURCE, *SEARCH_RESULTS))
    provenance = source.provenance.model_copy(update={"found_by": _RELEASED})
    source = source.model_copy(update={"provenance": provenance})
    document: JsonObject = json.loads(source.dumps())

    def edit(name: str, notes: str, changes: JsonObject, found_by: str = _RELEASED) -> PruningState:
        provenance: JsonObject = {"found_by": found_by, "notes": notes}
        return load_state({**document, "name": name, "provenance": provenance, **changes})

    entries = [Entry("source", source), *(Entry("search result", state) for state in results)]
    for backbone, budgets in BUDGETS.items():
        for budget in budgets:
            name = f"{SOURCE}-{backbone}-k{budget}"
            moved = transfer(source, budget, BACKBONE_SHAPES[backbone], name).state
            entries.append(Entry("transfer", moved))
    pool: JsonObject = {"pool": [{"atom": "quality_pool_builder"}]}
    alone: dict[str, JsonObject] = {
        policy: {
            "base_policy": {"name": policy, "params": {}},
            "scoring": _UNUSED_SCORING,
            "reassembly": {"atom": "mean_residual"},
            "constraints": {**pool, "selector": {"atom": "reference_strict_preservation_selector"}},
        }
        for policy in BASE_POLICIES
    }
    authors = "The authors of the method; parameters as they published them where nothing else is "
    for policy, changes in alone.items():
        notes = f"The base policy {policy} alone. {BASE_POLICIES[policy].doc}"
        entries.append(Entry("base policy", edit(policy, notes, changes, f"{authors}said.")))
    norm: JsonObject = {
        **alone["divprune"],
        "scoring": {**_UNUSED_SCORING, "signals": [{"atom": "visual_token_norm_saliency"}]},
        "constraints": {**pool, "selector": {"atom": "quality_topk_selector"}},
    }
    notes = (
        "Control: the K tokens of largest norm. What a policy is worth is what it gains over this."
    )
    entries.append(Entry("control", edit("norm", notes, norm, "This project.")))
    constraints = json.loads(source.dumps())["constraints"]
    for quota in QUOTAS:
        swept = {**constraints["selector"], "q_e": quota, "r_min": None}
        notes = f"Sweep of the exchange quota: q_e = {quota}, r_min = K - q_e."
        sweep: JsonObject = {"constraints": {**constraints, "selector": swept}}
        entries.append(Entry("ablation", edit(f"ablation-quota-{quota}", notes, sweep)))
    # Base policies need no such variants: divprune is the one of cdpruner, and so on.
    entries.append(Entry("instruction-free", instruction_free(source, "instruction-free")[0]))
    # For traffic that repeats images. Nothing is merged, and nothing in it was tuned on a model.
    core: JsonObject = {"share": 0.5, "policy": {"name": "divprune", "params": {}}}
    notes = (
        "Half of K by divprune, the same for every question about an image; the other half by "
        "cdpruner given these."
    )
    found_by = "The authors of the two methods; the split is ours."
    split = edit("shared-core", notes, {**alone["cdpruner"], "core": core}, found_by)
    return [*entries, Entry("shared core", split)]


def read_evidence(state: PruningState) -> Evidence | None:
    """The evidence in a state's provenance, or None where its scores have another form."""
    try:
        return Evidence.model_validate(state.provenance.scores)
    except ValidationError:
        return None


def write_state(state: PruningState, path: Path, evidence: Evidence | None = None) -> None:
    """Write a state with all of its defaults, so that later releases serve the same policy.

    Evidence goes into the provenance, which is outside the digest.
    """
    if evidence is not None:
        scores = evidence.model_dump(mode="json", exclude_none=True)
        changes = {"evaluated_on": _EVALUATED_ON, "scores": scores}
        provenance = state.provenance.model_copy(update=changes)
        state = state.model_copy(update={"provenance": provenance})
    path.write_text(_format_json(json.loads(state.dumps())) + "\n", encoding="utf-8")


def _format_json(value: JsonValue, indent: int = 0, key: str = "") -> str:
    """Indented JSON in which a list or an object that fits on one line stays on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    lead = f"{json.dumps(key, ensure_ascii=False)}: " if key else ""
    fits = indent > 0 and indent + len(lead) + len(flat) < _LINE_WIDTH
    if not isinstance(value, dict | list) or not value or fits:
        return lead + flat
    if isinstance(value, dict):
        parts = [_format_json(item, indent + 2, name) for name, item in value.items()]
    else:
        parts = [_format_json(item, indent + 2) for item in value]
    start, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    inner = ",\n".join(" " * (indent + 2) + part for part in parts)
    return f"{lead}{start}\n{inner}\n{' ' * indent}{end}"


def build(folder: Path) -> None:
    """Write every shipped state and delete the files of states that no longer exist."""
    entries = {entry.state.name: entry for entry in build_states(folder)}
    for name, entry in entries.items():
        path = folder / f"{name}.json"
        evidence = read_evidence(load_state(path)) if path.exists() else None
        valid = evidence and evidence.behaviour == _behaviour(entry.state)
        write_state(entry.state, path, evidence if valid and entry.carries_evidence else None)
    for path in folder.glob("*.json"):
        if path.stem not in entries:
            path.unlink()
    print(f"{len(entries)} states in {folder.name}/")


def _behaviour(state: PruningState) -> str:
    """SHA-256 of everything in a state that affects answers at a budget given by the request."""
    body = state.model_dump(mode="json", exclude={"name", "provenance", "budget"})
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def measure(folder: Path, scenes: int, budgets: Sequence[int], again: bool) -> None:
    """Measure states without valid evidence; each file is written at once, so none is lost.

    Evidence is valid if it was measured on this model, with the resize control, and the state has
    not changed since.
    """
    os.environ.update(_ENGINE)
    examples = draw_examples("test", scenes)
    model = f"mini-LLaVA {weights_digest(CHECKPOINTS['minillava'])}"
    measured: dict[str, Evidence] = {}
    resized: list[Answers] = []
    names = sorted(e.state.name for e in build_states(folder) if e.carries_evidence)
    for number, name in enumerate(names, 1):
        state = load_state(folder / f"{name}.json")
        behaviour = _behaviour(state)
        evidence = measured.get(behaviour) or (None if again else read_evidence(state))
        if (
            evidence is None
            or (evidence.model, evidence.behaviour) != (model, behaviour)
            or any(row.less_resized is None for row in evidence.rows)
        ):
            print(f"[{number}/{len(names)}] {name} ...", file=sys.stderr, flush=True)
            if not resized:
                resized = _ask(load_state(folder / f"{SOURCE}.json"), examples, budgets, "resized")
            rows = build_rows(examples, _ask(state, examples, budgets), resized)
            evidence = Evidence(
                model=model, questions=len(examples), behaviour=behaviour, rows=rows
            )
            print("   ", *(f"K={row.budget}: {row.accuracy}" for row in rows), file=sys.stderr)
        measured[behaviour] = evidence
        write_state(state, folder / f"{name}.json", evidence)


Answers = tuple[int, list[bool], float]
"""Answers to all questions at a K: which are right, and the mean prompt length."""


def _ask(
    state: PruningState, examples: Sequence[Example], budgets: Sequence[int], keep: str = "state"
) -> list[Answers]:
    """Ask every question at every budget; ``keep`` may be a control instead of the state.

    States are measured one after another in this process, because importing vLLM takes most of the
    time to start an engine.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = open_engine(settings={"state": json.loads(state.dumps())})
    measured = []
    try:
        for budget in budgets:
            entries = [{"budget": budget, "keep": keep}] * len(examples)
            outputs = answer_questions(engine, examples, entries)
            lengths = [len(output.prompt_token_ids or ()) for output in outputs]
            right = [
                is_right(output.outputs[0].text, example.answer)
                for output, example in zip(outputs, examples, strict=True)
            ]
            measured.append((budget, right, round(sum(lengths) / len(lengths), 1)))
    finally:
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
    return measured


def build_rows(
    examples: Sequence[Example], answers: Sequence[Answers], resized: Sequence[Answers]
) -> tuple[Row, ...]:
    """Evidence by budget, with the paired difference to the resize control."""
    bootstrap = ClusterBootstrap([example.image_id for example in examples])
    rows = []
    for (budget, right, length), (_, control, _) in zip(answers, resized, strict=True):
        grades = aggregate(examples, right)
        gains = [100.0 * (a - b) for a, b in zip(right, control, strict=True)]
        row = Row(
            budget=budget,
            accuracy=round(100 * grades.accuracy, 2),
            accuracy_plus=round(100 * grades.accuracy_plus, 2),
            prompt_tokens=length,
            resized=round(100 * aggregate(examples, control).accuracy, 2),
            less_resized=estimate(bootstrap.mean(gains)).rounded(2),
        )
        rows.append(row)
    return tuple(rows)


def as_markdown() -> str:
    """One row per state; the transferred states behave as their source and share its row."""
    entries = [Entry(e.family, load_state(e.state.name)) for e in build_states()]
    evidence = {entry.state.name: read_evidence(entry.state) for entry in entries}
    measured = [scores for scores in evidence.values() if scores]
    measured_rows = [row for scores in measured for row in scores.rows]
    budgets = sorted({row.budget for row in measured_rows}, reverse=True)

    def figures(accuracy: Mapping[int, float]) -> Iterator[str]:
        for budget in budgets:
            yield f"{accuracy[budget]:.1f}" if budget in accuracy else "not measured"

    rows = []
    if control := {row.budget: row.resized for row in measured_rows if row.resized is not None}:
        rows.append((RESIZED, "no policy: all tokens pooled to K cells", *figures(control)))
    for entry in entries:
        if entry.family != "transfer":
            name, scores = entry.state.name, evidence[entry.state.name]
            accuracy = {row.budget: row.accuracy for row in scores.rows} if scores else {}
            rows.append((f"`{name}`", _describe(entry), *figures(accuracy)))
    columns = ("state", "what it is", *(f"K = {budget}" for budget in budgets))
    table = Table("", columns, rows, "--" + "r" * len(budgets)).markdown()
    transferred = [f"`{entry.state.name}`" for entry in entries if entry.family == "transfer"]
    setups = sorted({(scores.model, scores.questions) for scores in measured})
    setup = "; ".join(f"{model}, {questions} questions" for model, questions in setups)
    return (
        f"{table}\n\nPer cent right, {setup}. `{SOURCE}` for the budgets and backbones "
        f"of the paper: {', '.join(transferred)}.\n"
    )


def _describe(entry: Entry) -> str:
    policy, state = materialize(entry.state), entry.state
    base, question_free = policy.base.name, "" if policy.reads_instruction else ", no instruction"
    match entry.family:
        case "base policy":
            return f"base policy alone{question_free}"
        case "instruction-free":
            return f"`{SOURCE}` upon {base}, which reads no instruction"
        case "source":
            return f"the paper's released policy: {base}, {policy.quota} tokens exchanged"
        case "search result":
            core = state.core
            shared = f", {core.share:.0%} of K the same for every question" if core else ""
            found_on = SEARCH_RESULTS[state.name]
            return f"found by a search on {found_on}, upon {base}{shared}{question_free}"
    return state.provenance.notes.rstrip(".")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and run one of the commands."""
    parser = CommandParser(
        prog="python -m benchmarks.policies",
        description="Build the shipped states and their evidence.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="write every state; evidence that still holds is kept")
    measuring = commands.add_parser(
        "measure", help="measure states without evidence; an interrupted run can be repeated"
    )
    measuring.add_argument("--scenes", type=int, default=100, help="scenes of the test split")
    measuring.add_argument("--budgets", type=int, nargs="+", default=[16, 8], help="each K")
    measuring.add_argument("--again", action="store_true", help="measure all states again")
    options = parser.parse_args(arguments)
    if options.command == "build":
        build(POLICIES)
    else:
        measure(POLICIES, options.scenes, options.budgets, options.again)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
