"""Offline evaluation of the checkpoint: full tokens, and K kept tokens by several selections.

Knows nothing about serving: it prunes between projector and language model by hand, so that its
figures check the model rather than the plugin. Answers are the greedy first token.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, CLIPModel, LlavaForConditionalGeneration

from benchmarks.minillava.scenes import GRID, PATCHES
from benchmarks.minillava.split import (
    CHECKPOINT,
    LEARNT_KINDS,
    UNLEARNT_KINDS,
    Example,
    Scores,
    evaluation_split,
    scores,
)
from benchmarks.minillava.towers import pixels
from benchmarks.minillava.vocabulary import AFTER_IMAGE, BEFORE_IMAGE
from vllm_autoprune.base_policies.cdpruner import CDPrunerParams, cdpruner
from vllm_autoprune.base_policies.divprune import DivPruneParams, divprune
from vllm_autoprune.tpdsl.tokens import Grid, Instruction, VisualTokens

BUDGETS = (32, 16, 8, 4)
BATCH = 64


@dataclass(frozen=True)
class Signals:
    """What a selection may read for each of M examples; patches are shared within an image."""

    features: Tensor  # (M, 144, 192) projected
    relevance: Tensor  # (M, 144, 128) visual projection of the penultimate patches
    text: Tensor  # (M, 128) projected text
    sign: int


Selection = Callable[[Sequence[Example], Signals, int], Tensor]


class Model:
    """The checkpoint, opened for pruning by hand."""

    def __init__(self, checkpoint: Path) -> None:
        load = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
        self.llava = LlavaForConditionalGeneration.from_pretrained(checkpoint / "llava", **load)
        self.clip = CLIPModel.from_pretrained(checkpoint / "clip", dtype=torch.float32)
        self.words = AutoTokenizer.from_pretrained(checkpoint / "llava")
        self.eyes = AutoTokenizer.from_pretrained(checkpoint / "clip")

    @torch.no_grad()
    def signals(self, examples: Sequence[Example]) -> Signals:
        """Features and relevance inputs of M examples."""
        images = {example.image_id: example.image for example in examples}
        places = {image_id: place for place, image_id in enumerate(images)}
        values = pixels(torch.stack(list(images.values())))
        hidden = self.llava.model.vision_tower(values, output_hidden_states=True)
        shared = hidden.hidden_states[-2][:, 1:]
        patches = shared[torch.tensor([places[example.image_id] for example in examples])]
        eye = self.clip.visual_projection(self.clip.vision_model.post_layernorm(patches.float()))
        encoded = self.eyes(
            [example.question for example in examples], padding=True, return_tensors="pt"
        )
        text = self.clip.text_projection(self.clip.text_model(**encoded).pooler_output)
        features = self.llava.model.multi_modal_projector(patches)
        return Signals(features, eye, text, self.clip.config.autoprune_relevance_sign)

    @torch.no_grad()
    def answers(self, examples: Sequence[Example], features: Tensor, kept: Tensor) -> list[str]:
        """Answers from `features` (M, 144, 192) at the raster patches `kept` (M, K)."""
        before = self.words(BEFORE_IMAGE, add_special_tokens=False).input_ids
        after = [
            self.words(AFTER_IMAGE.format(question=example.question)).input_ids
            for example in examples
        ]
        longest = max(map(len, after))
        # Padding follows the question, where the causal mask hides it from the last real token.
        padded = torch.tensor([ids + ids[-1:] * (longest - len(ids)) for ids in after])
        embed = self.llava.get_input_embeddings()
        image = features[torch.arange(len(kept))[:, None], kept.sort(dim=1).values]
        head = embed(torch.tensor(before)).expand(len(examples), -1, -1)
        embeds = torch.cat((head, image, embed(padded)), dim=1)
        hidden = self.llava.model.language_model(inputs_embeds=embeds, use_cache=False)
        start = len(before) + kept.shape[1]
        last = torch.tensor([start + len(ids) - 1 for ids in after])
        states = hidden.last_hidden_state[torch.arange(len(last)), last]
        best = self.llava.lm_head(states).argmax(-1)
        return [self.words.decode([int(token)]) for token in best]


def keep_all(examples: Sequence[Example], signals: Signals, count: int) -> Tensor:
    """Every patch."""
    return torch.arange(PATCHES).expand(len(examples), PATCHES)


def keep_random(examples: Sequence[Example], signals: Signals, count: int) -> Tensor:
    """A seeded random sample for each question."""
    rows = [
        random.Random(f"{example.image_id} {example.question}").sample(range(PATCHES), count)
        for example in examples
    ]
    return torch.tensor(rows)


def _tokens(signals: Signals, sign: int) -> VisualTokens:
    text = signals.text[:, None]
    segments = torch.ones(text.shape[:2], dtype=torch.bool)
    instruction = Instruction(signals.relevance, text, segments, sign)
    return VisualTokens(signals.features, Grid(GRID, GRID), instruction=instruction)


def keep_cdpruner(examples: Sequence[Example], signals: Signals, count: int) -> Tensor:
    """CDPruner with the sign that the tower's description states."""
    return cdpruner(CDPrunerParams(theta=None), _tokens(signals, signals.sign), count).picks


def keep_flipped(examples: Sequence[Example], signals: Signals, count: int) -> Tensor:
    """CDPruner with the wrong sign, to show that the sign matters."""
    return cdpruner(CDPrunerParams(theta=None), _tokens(signals, -signals.sign), count).picks


def keep_farthest(examples: Sequence[Example], signals: Signals, count: int) -> Tensor:
    """Farthest points among the projected features (DivPrune); blind to the question."""
    tokens = _tokens(signals, signals.sign)
    return divprune(DivPruneParams(tile_scope="per_tile"), tokens, count).picks


def keep_oracle(examples: Sequence[Example], signals: Signals, count: int) -> Tensor:
    """The question's evidence first, then a random rest."""
    rows = []
    for example, sample in zip(
        examples, keep_random(examples, signals, PATCHES).tolist(), strict=True
    ):
        held = set(example.evidence)
        rest = [patch for patch in sample if patch not in held]
        rows.append([*example.evidence, *rest][:count])
    return torch.tensor(rows)


SELECTIONS: dict[str, Selection] = {
    "random": keep_random,
    "farthest point": keep_farthest,
    "CDPruner": keep_cdpruner,
    "CDPruner, sign flipped": keep_flipped,
    "oracle": keep_oracle,
}


def evaluate(
    model: Model, examples: Sequence[Example], cases: Sequence[tuple[str, Selection, int]]
) -> dict[str, Scores]:
    """Scores by case name; a case is a name, a selection and K."""
    answers: dict[str, list[str]] = {name: [] for name, _, _ in cases}
    for start in range(0, len(examples), BATCH):
        part = examples[start : start + BATCH]
        signals = model.signals(part)
        for name, selection, count in cases:
            kept = selection(part, signals, count)
            answers[name] += model.answers(part, signals.features, kept)
    return {name: scores(examples, given) for name, given in answers.items()}


def _row(name: str, cells: Sequence[str]) -> str:
    return "| " + " | ".join((name, *cells)) + " |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def table(results: dict[str, Scores]) -> str:
    """Markdown: full tokens by kind, then accuracy (accuracy+) by selection and K."""
    full = results["full"]
    kinds = [*LEARNT_KINDS, *UNLEARNT_KINDS]
    lines = [
        _row("full tokens", ["accuracy", "accuracy+", *kinds]),
        _row("---", ["---"] * (len(kinds) + 2)),
        _row(
            "144",
            [_percent(full.accuracy), _percent(full.accuracy_plus)]
            + [_percent(full.by_kind[kind]) for kind in kinds],
        ),
        "",
        _row("keep, accuracy (accuracy+)", [f"K={count}" for count in BUDGETS]),
        _row("---", ["---"] * len(BUDGETS)),
    ]
    for name in SELECTIONS:
        found = [results[f"{name} {count}"] for count in BUDGETS]
        cells = [f"{_percent(item.accuracy)} ({_percent(item.accuracy_plus)})" for item in found]
        lines.append(_row(name, cells))
    return "\n".join(lines)


def main() -> None:
    """Parse, evaluate, print."""
    parser = argparse.ArgumentParser(description="Evaluate the small LLaVA with transformers.")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    cases: list[tuple[str, Selection, int]] = [("full", keep_all, PATCHES)]
    cases += [(f"{name} {k}", keep, k) for name, keep in SELECTIONS.items() for k in BUDGETS]
    results = evaluate(Model(arguments.checkpoint), evaluation_split(arguments.scenes), cases)
    if arguments.json:
        print(json.dumps({name: asdict(found) for name, found in results.items()}, indent=2))
    else:
        print(table(results))


if __name__ == "__main__":
    main()
