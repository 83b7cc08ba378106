"""`python -m benchmarks.efficiency`: full model, base policies and AutoPrune, as a table.

Knows nothing about how anything is measured.

    python -m benchmarks.efficiency --model mini-llava --budget 16
    python -m benchmarks.efficiency --model llava-next-7b --layers 2 --policies cdpruner
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.efficiency.measure import SERVED, Pass, Refused, measure, requests
from benchmarks.efficiency.models import MINI, NAMES, Model, model, text_tower
from benchmarks.efficiency.table import FULL, markdown
from benchmarks.load.arms import Arm, in_turn
from benchmarks.load.result import command, environment
from vllm_autoprune import AutopruneError, load_state

POLICIES = (
    "fastv", "pyramiddrop", "sparsevlm", "prumerge_plus", "trim", "visionzip", "dart",
    "divprune", "cdpruner",
)  # fmt: skip
_BEGUN = time.monotonic()


def parser() -> argparse.ArgumentParser:
    """The options; each has a default."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.efficiency", description=__doc__)
    made.add_argument("--model", choices=NAMES, default=MINI)
    made.add_argument("--layers", type=int, default=2, help="language layers of a true shape")
    made.add_argument("--budget", type=int, help="K; default: a ninth of the tokens")
    made.add_argument("--policies", default=",".join(POLICIES), help="base policies beside it")
    made.add_argument("--state", default="autoprune", help="a file or a name")
    made.add_argument("--requests", type=int, default=20, help="timed requests a pass")
    made.add_argument("--scenes", type=int, default=20, help="scenes of the score; 0: none")
    made.add_argument("--passes", type=int, default=1, help="2: ABBA")
    made.add_argument("--kv-cache-gb", type=int, default=1, help="KV cache of a CPU server")
    made.add_argument("--out", type=Path, default=Path("out/efficiency"))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every arm was served; 1: one was not, or something failed; 130: stopped."""
    chosen = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)  # so that servers are ended as by Ctrl-C
    try:
        return _make(chosen)
    except AutopruneError as error:
        print(f"efficiency: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("efficiency: stopped, no server is left running", file=sys.stderr)
        return 130


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _make(chosen: argparse.Namespace) -> int:
    served = model(chosen.model, chosen.layers, chosen.out)
    budget = chosen.budget or served.geometry.tokens // 9
    asked = requests(served, chosen.requests, chosen.out)
    arms = _arms(served, chosen, budget)
    passes: dict[str, list[Pass | Refused]] = {arm.name: [] for arm in arms}
    for number, arm in in_turn(arms, chosen.passes):
        log = chosen.out / "servers" / f"{served.label}-{number}-{arm.name}.log"
        found = measure(arm, served, asked, chosen.scenes, log)
        passes[arm.name].append(found)
        told = found.reason if isinstance(found, Refused) else f"prefill {found.prefill:.3f} s"
        print(
            f"[efficiency {time.monotonic() - _BEGUN:6.1f} s] {arm.name}: {told}", file=sys.stderr
        )
    text = "\n".join(markdown(served, budget, passes))
    told_by = ", ".join(f"{key} {value}" for key, value in environment().items())
    text = f"{text}\n\nEnvironment: {told_by}.\n\nCommand: `{shlex.join(command())}`\n"
    data = {
        "model": served.name,
        "layers": served.geometry.layers,
        "budget": budget,
        "digests": {arm.name: arm.digest for arm in arms},
        "passes": {name: [one.model_dump() for one in found] for name, found in passes.items()},
        "environment": environment(),
    }
    (chosen.out / f"{served.label}.md").write_text(text)
    (chosen.out / f"{served.label}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(text)
    refused = any(isinstance(one, Refused) for found in passes.values() for one in found)
    return 1 if refused else 0


def _arms(served: Model, chosen: argparse.Namespace, budget: int) -> list[Arm]:
    common = (
        "--served-model-name", SERVED, *served.flags, "--block-size", "32", "--enforce-eager",
        "--dtype", "bfloat16", "--max-num-seqs", "8",
    )  # fmt: skip
    tower = text_tower(served, chosen.out)
    pruning = (
        "--autoprune-budget", str(budget),
        *(() if tower is None else ("--autoprune-text-tower", str(tower))),
    )  # fmt: skip
    kv = (("VLLM_CPU_KVCACHE_SPACE", str(chosen.kv_cache_gb)),)
    states = [name for name in chosen.policies.split(",") if name]
    arms = [Arm(name=FULL, model=str(served.folder), flags=common, environment=kv)]
    for name, state in (*((name, name) for name in states), ("AutoPrune", chosen.state)):
        flags = (*common, "--autoprune-state", state, *pruning)
        digest = load_state(state).digest
        arms.append(
            Arm(
                name=name,
                model=str(served.folder),
                flags=flags,
                digest=digest,
                environment=kv,
            )
        )
    return arms


if __name__ == "__main__":
    sys.exit(main())
