"""``python -m benchmarks.zoo build | measure | table``: makes ``policies/`` and its evidence.

Knows nothing about what a state does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo.evidence import Evidence, known, with_evidence
from benchmarks.zoo.files import write
from benchmarks.zoo.states import FOUND, SOURCE, zoo
from benchmarks.zoo.table import as_markdown
from vllm_autoprune import PruningState, load_state

# An engine in this process, and quiet: there are many of them.
ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
          "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip

POLICIES = Path(__file__).resolve().parents[2] / "policies"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the files, or measure those that have no evidence yet; a stopped run goes on."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="write every state; evidence that still holds is kept")
    commands.add_parser("table", help="print the table that README.md shows")
    asked = commands.add_parser("measure", help="measure states without evidence, one by one")
    asked.add_argument("--scenes", type=int, default=100, help="of the held-out split")
    asked.add_argument("--budgets", type=int, nargs="+", default=[16, 8])
    asked.add_argument("--again", action="store_true", help="measure all of them anew")
    options = parser.parse_args(arguments)
    if options.command == "build":
        build(POLICIES)
    elif options.command == "table":
        print(as_markdown(), end="")
    else:
        measure_all(POLICIES, options.scenes, options.budgets, options.again)
    return 0


def build(folder: Path) -> None:
    """Write every state of the zoo and take away files that are no longer in it."""
    source, *found = (load_state(folder / f"{name}.json") for name in (SOURCE, *FOUND))
    states = {entry.state.name: entry.state for entry in zoo(source, found)}
    for name, state in states.items():
        path = folder / f"{name}.json"
        old = load_state(path) if path.exists() else None
        evidence = None if old is None else known(old)
        if evidence is not None:
            state = with_evidence(state, evidence)
        write(state, path)
    for path in folder.glob("*.json"):
        if path.stem not in states:
            path.unlink()
    print(f"{len(states)} states in {folder.name}/")


def measure_all(folder: Path, scenes: int, budgets: Sequence[int], again: bool) -> None:
    """Measure state after state and write each file at once, so that a stopped run goes on."""
    os.environ.update(ENGINE)
    from benchmarks.zoo.measure import checkpoint_digest, measure, questions

    examples = questions(scenes)
    done: dict[str, Evidence] = {}
    paths = sorted(folder.glob("*.json"))
    for number, path in enumerate(paths, 1):
        state = load_state(path)
        key = _behaviour(state)
        evidence = done.get(key) or (None if again else _current(state, checkpoint_digest()))
        if evidence is None:
            print(f"[{number}/{len(paths)}] {state.name} ...", file=sys.stderr, flush=True)
            found = measure(state, examples, budgets)
            evidence = Evidence(
                model=f"mini-LLaVA {checkpoint_digest()}",
                questions=len(examples),
                behaviour=key,
                rows=found,
            )
            print("   ", *(f"K={r.budget}: {r.accuracy}" for r in found), file=sys.stderr)
        done[key] = evidence
        write(with_evidence(state, evidence), path)


def _behaviour(state: PruningState) -> str:
    from benchmarks.zoo.measure import behaviour

    return behaviour(state)


def _current(state: PruningState, digest: str) -> Evidence | None:
    found = known(state)
    if found is None or found.model != f"mini-LLaVA {digest}":
        return None
    return found if found.behaviour == _behaviour(state) else None


if __name__ == "__main__":
    raise SystemExit(main())
