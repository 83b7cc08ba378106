"""`python -m benchmarks.cost efficiency`: full model, base policies and AutoPrune, as a table.

python -m benchmarks.cost efficiency --model mini-llava --budget 16
python -m benchmarks.cost efficiency --model llava-next-7b --layers 2 --policies cdpruner
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from benchmarks.common.progress import log_progress
from benchmarks.common.report import command_line, environment, format_environment
from benchmarks.cost.efficiency.measure import SERVED, Pass, Refusal, measure, prepare_requests
from benchmarks.cost.efficiency.models import MINI, NAMES, Model, find_text_tower, load_model
from benchmarks.cost.efficiency.table import FULL, markdown
from benchmarks.load.experiment import Arm, interleave
from vllm_autoprune import load_state

POLICIES = (
    "fastv", "pyramiddrop", "sparsevlm", "prumerge_plus", "trim", "visionzip", "dart",
    "divprune", "cdpruner",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    add = parser.add_argument
    add("--model", choices=NAMES, default=MINI, help="checkpoint, or true shape without weights")
    add("--layers", type=int, default=2, help="language layers of a true shape")
    add("--budget", type=int, help="K (default: a ninth of the visual tokens)")
    add("--policies", default=",".join(POLICIES), help="base policies to compare with")
    add("--state", default="autoprune", help="pruning state, a file or a name")
    add("--requests", type=int, default=20, help="timed requests a pass")
    add("--scenes", type=int, default=20, help="scenes of the score; 0: no score")
    add("--passes", type=int, default=1, help="passes over all arms (2: ABBA)")
    add("--kv-cache-gb", type=int, default=1, help="size of a CPU server's KV cache")
    add("--out", type=Path, default=Path("out/efficiency"), help="folder of files")


def run(options: argparse.Namespace) -> int:
    """0: every arm was served; 1: one was not."""
    model = load_model(options.model, options.layers, options.out)
    budget = options.budget or model.geometry.tokens // 9
    requests = prepare_requests(model, options.requests, options.out)
    arms = _build_arms(model, options, budget)
    passes: dict[str, list[Pass | Refusal]] = {arm.name: [] for arm in arms}
    for number, arm in interleave(arms, options.passes):
        log = options.out / "servers" / f"{model.label}-{number}-{arm.name}.log"
        result = measure(arm, model, requests, options.scenes, log)
        passes[arm.name].append(result)
        text = result.reason if isinstance(result, Refusal) else f"prefill {result.prefill:.3f} s"
        log_progress(f"{arm.name}: {text}")
    machine = environment()
    text = "\n".join(markdown(model, budget, passes))
    text += f"\n\nEnvironment: {format_environment(machine)}.\n"
    text += f"\nCommand: `{shlex.join(command_line())}`\n"
    data = {
        "model": model.name,
        "layers": model.geometry.layers,
        "budget": budget,
        "digests": {arm.name: arm.digest for arm in arms},
        "passes": {name: [one.model_dump() for one in own] for name, own in passes.items()},
        "environment": machine,
    }
    (options.out / f"{model.label}.md").write_text(text)
    (options.out / f"{model.label}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(text)
    return int(any(isinstance(one, Refusal) for own in passes.values() for one in own))


def _build_arms(model: Model, options: argparse.Namespace, budget: int) -> list[Arm]:
    common = (
        "--served-model-name", SERVED, *model.flags, "--block-size", "32", "--enforce-eager",
        "--max-num-seqs", "8",
    )  # fmt: skip
    tower = find_text_tower(model, options.out)
    pruning = (
        "--autoprune-budget", str(budget),
        *(() if tower is None else ("--autoprune-text-tower", str(tower))),
    )  # fmt: skip
    kv = (("VLLM_CPU_KVCACHE_SPACE", str(options.kv_cache_gb)),)
    states = [name for name in options.policies.split(",") if name]
    arms = [Arm(name=FULL, model=str(model.folder), flags=common, environment=kv)]
    for name, state in (*((name, name) for name in states), ("AutoPrune", options.state)):
        flags = (*common, "--autoprune-state", state, *pruning)
        digest = load_state(state).digest
        arms.append(
            Arm(
                name=name,
                model=str(model.folder),
                flags=flags,
                digest=digest,
                environment=kv,
            )
        )
    return arms
