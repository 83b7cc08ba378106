"""Verdicts on first and further questions, from hand-written answers."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.cost.overhead.settings import build_request
from benchmarks.cost.questions.arms import (
    BLOCK,
    HALF,
    SPLIT,
    STOCK,
    TODAY,
    build_arms,
    load_shape,
    request_settings,
)
from benchmarks.cost.questions.ttft import Answer, Measured, build_section
from vllm_autoprune import load_state


def measured(first: float, *further: float, processor: float = 1.0) -> Measured:
    """Eight images; the processor time of each question is ``processor`` times its TTFT."""
    row = tuple(
        Answer(ttft=ttft, processor=processor * ttft, prompt_tokens=80, cached_tokens=cached)
        for ttft, cached in ((first, 0), *((one, 64) for one in further))
    )
    return Measured(rows=(row,) * 8)


def verdicts(arms: dict[str, Measured]) -> list[str]:
    return [claim.verdict for claim in build_section([], arms, "0").claims]


def test_the_split_is_compared_with_stock_and_with_the_unsplit_state() -> None:
    arms = {STOCK: measured(1.3, 0.2), TODAY: measured(0.4, 0.3), SPLIT: measured(0.41, 0.22)}

    assert verdicts(arms) == ["holds"] * 4
    assert verdicts({**arms, SPLIT: measured(0.42, 0.22)})[1] == "does not hold"
    assert verdicts({**arms, SPLIT: measured(0.41, 0.24)})[0] == "does not hold"


def test_processor_time_is_judged_by_itself() -> None:
    arms = {
        STOCK: measured(1.3, 0.2),
        TODAY: measured(0.4, 0.3),
        SPLIT: measured(0.4, 0.2, processor=2.0),
    }

    assert verdicts(arms) == ["holds", "holds", "does not hold", "does not hold"]


def test_another_question_is_the_median_of_an_images_further_ones() -> None:
    assert measured(0.4, 0.1, 0.3, 0.2).again("ttft") == (0.2,) * 8


def test_arms_differ_in_the_state_alone(tmp_path: Path) -> None:
    model = load_shape(HALF, 1, tmp_path)
    stock, today, split = build_arms(model, (STOCK, TODAY, SPLIT), "cdpruner", 0.8, 64, tmp_path)

    assert "--autoprune-state" not in stock.flags and stock.digest is None
    assert today.flags[: len(stock.flags)] == split.flags[: len(stock.flags)] == stock.flags
    assert stock.flags[stock.flags.index("--block-size") + 1] == str(BLOCK)
    core = load_state(split.flags[split.flags.index("--autoprune-state") + 1]).core
    assert core is not None and (core.share, core.policy.name) == (0.8, "divprune")
    assert today.digest == load_state("cdpruner").digest != split.digest
    config = json.loads((model.folder / "config.json").read_text())
    assert config["text_config"]["hidden_size"] == model.geometry.width == 2048


def test_requests_to_a_shared_server_choose_their_arm() -> None:
    settings = request_settings((SPLIT, STOCK, TODAY), "cdpruner", 64)
    sent = {
        name: json.loads(build_request("m", "w1", pruning=pruning)).get("mm_processor_kwargs")
        for name, pruning in settings.items()
    }

    assert sent == {
        SPLIT: None,  # what the server does by itself
        TODAY: {"autoprune": {"state": "cdpruner", "budget": 64}},
    }
