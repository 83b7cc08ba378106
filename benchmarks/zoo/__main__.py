"""``python -m benchmarks.zoo build | measure | table``: build ``policies/`` and its evidence."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.minillava.engine import answer_questions, open_engine
from benchmarks.minillava.split import (
    CHECKPOINT,
    CLIP,
    Example,
    aggregate,
    draw_examples,
    is_right,
    weights_digest,
)
from benchmarks.zoo.evidence import (
    Evidence,
    Row,
    as_markdown,
    read_evidence,
    with_evidence,
    write_state,
)
from benchmarks.zoo.states import SEARCH_RESULTS, SOURCE, build_states
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.statistics import ClusterBootstrap, estimate


@dataclass(frozen=True)
class Answers:
    """Answers to all questions at one budget: which are right, and the mean prompt length."""

    budget: int
    right: list[bool]
    prompt_tokens: float


def measure_state(
    state: PruningState, examples: Sequence[Example], budgets: Sequence[int], keep: str = "state"
) -> list[Answers]:
    """Ask every question at every budget, in one engine in this process.

    States are measured one after another in the same process, because importing vLLM takes most of
    the time to start an engine. ``keep`` may be a control instead of the state.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"state": json.loads(state.dumps()), "text_tower": str(CLIP)}
    engine = open_engine(CHECKPOINT, settings)
    measured = []
    try:
        for budget in budgets:
            outputs = answer_questions(engine, examples, budget, keep)
            lengths = [len(output.prompt_token_ids or ()) for output in outputs]
            right = [
                is_right(output.outputs[0].text, example.answer)
                for output, example in zip(outputs, examples, strict=True)
            ]
            measured.append(Answers(budget, right, round(sum(lengths) / len(lengths), 1)))
    finally:
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
    return measured


def build_rows(
    examples: Sequence[Example], own: Sequence[Answers], resized: Sequence[Answers]
) -> tuple[Row, ...]:
    """Evidence by budget, with the paired difference to the resize control."""
    bootstrap = ClusterBootstrap([example.image_id for example in examples])
    rows = []
    for answers, control in zip(own, resized, strict=True):
        score = aggregate(examples, answers.right)
        gains = [100.0 * (a - b) for a, b in zip(answers.right, control.right, strict=True)]
        rows.append(
            Row(
                budget=answers.budget,
                accuracy=round(100 * score.accuracy, 2),
                accuracy_plus=round(100 * score.accuracy_plus, 2),
                prompt_tokens=answers.prompt_tokens,
                resized=round(100 * aggregate(examples, control.right).accuracy, 2),
                less_resized=estimate(bootstrap.mean(gains)).rounded(2),
            )
        )
    return tuple(rows)


def behaviour_digest(state: PruningState) -> str:
    """SHA-256 of everything in a state that affects answers at a budget given by the request."""
    body = state.model_dump(mode="json", exclude={"name", "provenance", "budget"})
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# A quiet engine in this process, because many are started one after another.
ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
          "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip

POLICIES = Path(__file__).resolve().parents[2] / "policies"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and run one of the three commands."""
    parser = CommandParser(
        prog="python -m benchmarks.zoo", description="Build the shipped states and their evidence."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="write every state; evidence that still holds is kept")
    commands.add_parser("table", help="print the table of docs/shipped-states.md")
    measuring = commands.add_parser(
        "measure", help="measure states without evidence; an interrupted run can be repeated"
    )
    measuring.add_argument("--scenes", type=int, default=100, help="scenes of the test split")
    measuring.add_argument("--budgets", type=int, nargs="+", default=[16, 8], help="each K")
    measuring.add_argument("--again", action="store_true", help="measure all states again")
    options = parser.parse_args(arguments)
    if options.command == "build":
        build(POLICIES)
    elif options.command == "table":
        print(as_markdown(), end="")
    else:
        measure_all(POLICIES, options.scenes, options.budgets, options.again)
    return 0


def build(folder: Path) -> None:
    """Write every shipped state and delete the files of states that no longer exist."""
    source, *results = (load_state(folder / f"{name}.json") for name in (SOURCE, *SEARCH_RESULTS))
    entries = {entry.state.name: entry for entry in build_states(source, results)}
    states = {name: entry.state for name, entry in entries.items()}
    for name, state in states.items():
        path = folder / f"{name}.json"
        evidence = read_evidence(load_state(path)) if path.exists() else None
        stale = evidence is None or evidence.behaviour != behaviour_digest(state)
        if evidence is None or stale or not entries[name].carries_evidence:
            write_state(state, path)
        else:
            write_state(with_evidence(state, evidence), path)
    for path in folder.glob("*.json"):
        if path.stem not in states:
            path.unlink()
    print(f"{len(states)} states in {folder.name}/")


def measure_all(folder: Path, scenes: int, budgets: Sequence[int], again: bool) -> None:
    """Measure one state after another; each file is written at once, so no result is lost."""
    os.environ.update(ENGINE)
    examples = draw_examples("test", scenes)
    model = f"mini-LLaVA {weights_digest(CHECKPOINT)}"
    measured: dict[str, Evidence] = {}
    resized: list[Answers] = []
    source, *results = (load_state(folder / f"{name}.json") for name in (SOURCE, *SEARCH_RESULTS))
    entries = build_states(source, results)
    paths = [folder / f"{entry.state.name}.json" for entry in entries if entry.carries_evidence]
    for number, path in enumerate(sorted(paths), 1):
        state = load_state(path)
        behaviour = behaviour_digest(state)
        evidence = measured.get(behaviour)
        if evidence is None and not again:
            evidence = _valid_evidence(state, model, behaviour)
        if evidence is None:
            print(f"[{number}/{len(paths)}] {state.name} ...", file=sys.stderr, flush=True)
            if not resized:
                resized = measure_state(load_state(SOURCE), examples, budgets, keep="resized")
            rows = build_rows(examples, measure_state(state, examples, budgets), resized)
            evidence = Evidence(
                model=model, questions=len(examples), behaviour=behaviour, rows=rows
            )
            print("   ", *(f"K={row.budget}: {row.accuracy}" for row in rows), file=sys.stderr)
        measured[behaviour] = evidence
        write_state(with_evidence(state, evidence), path)


def _valid_evidence(state: PruningState, model: str, behaviour: str) -> Evidence | None:
    """The evidence of a state, if it was measured on this model and nothing has changed since.

    Evidence without the resize control is measured again.
    """
    evidence = read_evidence(state)
    if evidence is None or (evidence.model, evidence.behaviour) != (model, behaviour):
        return None
    if any(row.less_resized is None for row in evidence.rows):
        return None
    return evidence


if __name__ == "__main__":
    raise SystemExit(main())
