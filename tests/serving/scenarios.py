"""Scenarios on a real engine, each run in a process of its own by :func:`run`.

Knows nothing about what is right: a scenario reports what happened, tests judge it.

``python -m tests.serving.scenarios NAME`` prints one line of JSON, last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

Report = Any
"""Plain JSON; each scenario's docstring says what is in it."""

SCENARIOS: dict[str, Callable[[], Report]] = {}

_MARK = "scenario-report:"


def scenario(function: Callable[[], Report]) -> Callable[[], Report]:
    """Enter a scenario under its own name."""
    SCENARIOS[function.__name__] = function
    return function


def run(name: str, **environment: str) -> Report:
    """The report of a scenario, run once a test session and environment."""
    report, failure = _outcome(name, tuple(sorted(environment.items())))
    assert failure is None, failure
    return report


@cache
def _outcome(name: str, environment: tuple[tuple[str, str], ...]) -> tuple[Report, str | None]:
    # A failure is remembered too: every test of the scenario would wait for it again.
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.scenarios", name],
        cwd=Path(__file__).resolve().parents[2],
        env=_environment(dict(environment)),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK)), None
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
    return None, f"scenario {name} ended with {done.returncode}:\n{tail}"


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    engine = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return {**os.environ, **engine, **extra}


@scenario
def plain() -> Report:
    """Tokens and exact log-probabilities of a model without a state."""
    return _exact(None)


@scenario
def everything_kept() -> Report:
    """As :func:`plain`, with a state whose K is at least N."""
    from tests.serving.engine import STATE

    return _exact({**STATE, "budget": 4096})


def _exact(settings: Mapping[str, object] | None) -> Report:
    from tests.serving.engine import chat, examples, start, turn

    llm = start(settings)
    asked = [[turn(e.question, e.image)] for e in examples(2)]
    both = [[turn("Which shape is red?", examples(2)[0].image, examples(2)[-1].image)]]
    return [answer.plain() for one in [*asked, *both] for answer in chat(llm, [one], tokens=8)]


@scenario
def interleaved() -> Report:
    """Two questions on each of several images, in turns, prefix caching on."""
    from tests.serving.engine import ask, examples, start, vision_runs

    llm = start({**_state(), "budget": 32})
    before = vision_runs(llm)
    report: dict[str, Any] = {"first": [], "again": [], "alone": [], "answers": []}
    asked = examples(3)
    for example in asked:
        report["first"].append(ask(llm, example).plain())
        report["answers"].append(example.answer)
    report["vision_runs"] = vision_runs(llm) - before
    report["images"] = len({e.image_id for e in asked})
    for example in reversed(asked):
        report["again"].insert(0, ask(llm, example).plain())
    report["vision_runs_again"] = vision_runs(llm) - before
    for example in asked:
        llm.reset_prefix_cache()
        llm.llm_engine.reset_mm_cache()
        llm.llm_engine.reset_encoder_cache()
        report["alone"].append(ask(llm, example).plain())
    return report


@scenario
def instruction_left_out() -> Report:
    """Negative control: what :func:`interleaved` would be without the instruction's identity."""
    from tests.serving.engine import ask, examples, start
    from vllm_autoprune.serving import processor
    from vllm_autoprune.serving.plan import pruned_identity

    def without(identity: str, digest: str, budget: int, keep: Any, ids: Any) -> str:
        return pruned_identity(identity, digest, budget, keep, None)

    llm = start({**_state(), "budget": 4})
    asked = examples(6)
    right = [ask(llm, e).plain() for e in asked]
    llm.reset_prefix_cache()
    with patch.object(processor, "pruned_identity", without):
        wrong = [ask(llm, e).plain() for e in asked]
    return {"right": right, "wrong": wrong, "answers": [e.answer for e in asked]}


@scenario
def batches() -> Report:
    """Mixed budgets at once and one by one, bounded vision batches, many images, follow-ups."""
    from tests.serving.engine import (
        chat,
        examples,
        generate,
        model_of,
        picture,
        prompt,
        start,
        turn,
    )
    from tests.serving.watch import watch

    llm = start({**_state(), "budget": 32})
    model = model_of(llm)
    seen = watch(model.vision_tower)
    asked = examples(4)[:12]
    budgets = [8 + 4 * i for i in range(len(asked))]
    together = generate(llm, [prompt(e, k) for e, k in zip(asked, budgets, strict=True)])
    kept_together = {str(plan): rows for plan, rows in seen.kept.items()}
    mixed = list(seen.budgets)
    _forget(llm)
    seen.kept.clear()
    alone = [generate(llm, [prompt(e, k)])[0] for e, k in zip(asked, budgets, strict=True)]
    kept_alone = {str(plan): rows for plan, rows in seen.kept.items()}
    _forget(llm)
    seen.vision_batches.clear()
    scenes = [picture(e.image).rotate(7 * i) for i, e in enumerate(examples(4)[:20])]
    many = [
        {
            "prompt": "USER: " + "<image>" * 20 + f"\nHow many? {i} ASSISTANT:",
            "multi_modal_data": {"image": [scene.rotate(i) for scene in scenes]},
            "mm_processor_kwargs": {"autoprune": {"budget": 2}},
        }
        for i in range(5)
    ]
    twenty = generate(llm, many)
    conversation = [turn(asked[0].question, asked[0].image)]
    first = chat(llm, [conversation])[0]
    later = [
        *conversation,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": [{"type": "text", "text": asked[1].question}]},
    ]
    return {
        "together": [a.plain() for a in together],
        "alone": [a.plain() for a in alone],
        "kept_together": kept_together,
        "kept_alone": kept_alone,
        "budgets_at_once": max(len(set(b)) for b in mixed),
        "twenty": [a.plain() for a in twenty],
        "vision_batches": seen.vision_batches,
        "bound": model.autoprune_batch,
        "turn_one": first.plain(),
        "turn_two": chat(llm, [later])[0].plain(),
    }


@scenario
def whole_prefill() -> Report:
    """Answers and kept tokens when every prompt is prefilled in one step."""
    return _prefilled(max_num_batched_tokens=4096)


@scenario
def chunked_prefill() -> Report:
    """The same in steps of 16 tokens, which cut through the image."""
    return _prefilled(max_num_batched_tokens=16, max_num_seqs=4)


@scenario
def no_caches() -> Report:
    """The same with the prefix cache and vLLM's multi-modal caches off, and ours too."""
    return _prefilled({"feature_cache_gb": 0}, enable_prefix_caching=False, mm_processor_cache_gb=0)


def _prefilled(settings: Mapping[str, object] | None = None, **options: object) -> Report:
    from tests.serving.engine import chat, examples, start, turn
    from tests.serving.watch import watch

    llm = start({**_state(), **(settings or {})}, **options)
    seen = watch()
    asked = examples(3)[:8]
    said = [chat(llm, [[turn(e.question, e.image)]])[0].plain() for e in asked]
    pair = chat(llm, [[turn("What digit is on the red shape?", asked[0].image, asked[-1].image)]])
    return {
        "answers": [*said, pair[0].plain()],
        "kept": [[list(p.instruction), rows] for p, rows in seen.kept.items()],
    }


@scenario
def hostile() -> Report:
    """Requests that must not stop the engine, and whether it still answers after each."""
    import torch
    from PIL import Image

    from tests.serving.engine import (
        ask,
        examples,
        generate,
        model_of,
        picture,
        prompt,
        start,
        turn,
    )
    from tests.serving.engine import chat as chat_

    llm = start({**_state(), "budget": 8})
    model = model_of(llm)
    example, other = examples(2)[0], examples(2)[-1]
    sane = ask(llm, example).plain()
    report: dict[str, Any] = {"sane": sane, "after": {}}

    def survived(name: str) -> None:
        _forget(llm)
        report["after"][name] = ask(llm, example).plain()

    tiny = Image.new("RGB", (1, 1), (255, 0, 0))
    report["one_pixel"] = chat_(llm, [[turn("What is it?", tiny)]])[0].plain()
    survived("one_pixel")
    report["empty"] = chat_(llm, [[turn("", other.image)]])[0].plain()
    survived("empty")
    long = " ".join(["red"] * 10_000)
    report["long"] = generate(llm, [prompt(other, instruction=long)])[0].plain()
    survived("long")
    for name, value in (("nan", float("nan")), ("inf", float("inf"))):
        broken = _breaking(model.multi_modal_projector, value)
        # An image not seen before, whose features are not cached yet.
        unseen = picture(other.image).rotate(len(name) + 90 * (name == "inf"))
        report[name] = chat_(llm, [[turn(f"{name}?", unseen)]])[0].plain()
        broken.remove()
        survived(name)
    report["fallbacks"] = model.autoprune_meter.counts()
    from vllm_autoprune.tpdsl import refine as executor

    def raising(*args: object) -> torch.Tensor:
        raise RuntimeError("made to fail")

    with patch.object(executor, "run_fusion", raising):
        report["raised"] = chat_(llm, [[turn("raise?", other.image)]])[0].plain()
    report["errors"] = model.autoprune_meter.raised
    survived("raised")
    for name, asked in (
        ("zero", {"budget": 0}),
        ("text", {"budget": "8"}),
        ("unknown", {"buget": 8}),
        ("list", [8]),
    ):
        raw = {**prompt(other), "mm_processor_kwargs": {"autoprune": asked}}
        try:
            generate(llm, [raw])
            report[name] = "accepted"
        except ValueError as error:
            report[name] = str(error)
    survived("refused")
    return report


def _breaking(module: Any, value: float) -> Any:
    import torch

    def spoil(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, 5] = value
        return output

    return module.register_forward_hook(spoil)


@scenario
def blind_state() -> Report:
    """A state that does not read the instruction: questions on one image share everything."""
    from tests.serving.engine import ask, examples, start, vision_runs
    from vllm_autoprune import load_state

    own = json.loads(load_state("autoprune").dumps())
    own["base_policy"] = {"name": "divprune", "params": {}}
    own["constraints"]["selector"]["q_e"] = 0
    own["name"] = "divprune"
    llm = start({"state": own, "budget": 32})
    before = vision_runs(llm)
    asked = examples(1)
    return {
        "answers": [ask(llm, e).plain() for e in asked],
        "vision_runs": vision_runs(llm) - before,
    }


@scenario
def embeddings_for_relevance() -> Report:
    """No text tower: relevance from the language model's own input embeddings."""
    from tests.serving.engine import ask, examples, model_of, start
    from tests.serving.watch import watch

    llm = start({"state": "autoprune", "budget": 32})
    seen = watch()
    answers = [ask(llm, e).plain() for e in examples(2)]
    vision = model_of(llm).autoprune
    assert vision is not None
    relevance = vision.relevance()
    assert relevance is not None
    return {
        "answers": answers,
        "kind": type(relevance).__name__,
        "sign": relevance.sign,
        "kept": list(seen.kept.values()),
    }


@scenario
def one_rank() -> Report:
    """Answers and kept tokens on one rank, to compare with :func:`two_ranks`."""
    return _ranked(1)


@scenario
def two_ranks() -> Report:
    """Answers at TP = 2, and what each rank would have kept before they agree."""
    return _ranked(2)


def _ranked(ranks: int) -> Report:
    from tests.serving.engine import chat, examples, start, turn

    llm = start(_state(), tensor_parallel_size=ranks)
    llm.collective_rpc(begin_watching)
    asked = examples(4)
    said = [chat(llm, [[turn(e.question, e.image)]])[0].plain() for e in asked]
    return {"answers": said, "kept": llm.collective_rpc(seen_here)}


def begin_watching(worker: object) -> None:
    """Runs in every worker: note what is selected from now on."""
    from tests.serving.watch import watch

    _WATCHED.append(watch())


def seen_here(worker: object) -> list[list[list[int]]]:
    """Runs in every worker: the indices it chose, before ranks agree."""
    return _WATCHED[-1].before_broadcast


_WATCHED: list[Any] = []


def _state() -> dict[str, object]:
    from tests.serving.engine import STATE

    return dict(STATE)


def _forget(llm: Any) -> None:
    llm.reset_prefix_cache()
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()


if __name__ == "__main__":
    # Through the module's importable name, so that workers can find its functions.
    from tests.serving import scenarios

    print(_MARK + json.dumps(scenarios.SCENARIOS[sys.argv[1]]()))
