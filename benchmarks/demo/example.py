"""The picture at the end of the demo: one example, its kept tokens and its answers.

Both are recomputed: the checkpoint is opened with transformers, and the server's own code chooses
the tokens. Its inputs equal the server's up to the rounding in other kernels, which may exchange
patches of nearly equal rank.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from benchmarks.demo import picture
from benchmarks.demo.configurations import FULL, NAMES, Configuration
from benchmarks.demo.measure import Measured, Questions, Settings
from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from benchmarks.minillava.split import Example, grade_answers, png
from vllm_autoprune import load_state, materialize, refine
from vllm_autoprune.checkpoints.llava import LlavaVision
from vllm_autoprune.ops.dtype import Dtype
from vllm_autoprune.report.trace import trace_images
from vllm_autoprune.serving.shared.identities import hash_picture, make_feature_key
from vllm_autoprune.serving.shared.text_tower import read_text_tower
from vllm_autoprune.serving.worker.selection import select_at_random


@dataclass(frozen=True)
class Explanation:
    """Raster indices of the kept patches, and the answer that they lead to.

    ``owners`` has for every patch the kept one that it is merged into, or -1.
    """

    configuration: Configuration
    kept: tuple[int, ...]
    answer: str
    owners: tuple[int, ...] = ()


class Explainer:
    """A checkpoint and a state, opened once."""

    def __init__(self, model: Path, text_tower: Path, state: str, dtype: Dtype) -> None:
        self._state = load_state(state)
        tower = read_text_tower(str(text_tower))
        self._vision = LlavaVision(model, tower, dtype)

    @torch.no_grad()
    def explain(
        self, image: Image.Image, question: str, configuration: Configuration
    ) -> Explanation:
        """The tokens that a server would keep, and the answer that it would give."""
        tokens = self._vision.encode(image, question)
        budget, owners = configuration.budget, tuple[int, ...]()
        if configuration.keep == "full" or budget is None:
            kept, rows = torch.arange(tokens.count), tokens.features[0]
        elif configuration.keep == "random":
            key = make_feature_key(hash_picture(image))
            kept = select_at_random(budget, tokens, [key]).indices[0]
            rows = tokens.features[0, kept]
        else:
            state = self._state if configuration.keep == "state" else self._state.without_exchange()
            policy = materialize(state, budget)
            refined = refine(policy, tokens)
            (trace,) = trace_images(policy, tokens, refined)
            kept, rows, owners = refined.indices[0], refined.features[0], trace.owners
        answer = self._answer(rows, question)
        return Explanation(configuration, tuple(sorted(kept.tolist())), answer, owners)

    def _answer(self, rows: Tensor, question: str) -> str:
        processor, llava = self._vision.processor, self._vision.model
        content = [{"type": "image"}, {"type": "text", "text": question}]
        chat = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        words, image = processor.tokenizer, processor.image_token
        ids = words(chat.replace(image, image * len(rows)), return_tensors="pt").input_ids
        embedded = llava.get_input_embeddings()(ids)
        embedded[ids == words.convert_tokens_to_ids(image)] = rows
        ids_out: list[int] = []
        while len(ids_out) < MAX_ANSWER_TOKENS:
            hidden = llava.model.language_model(inputs_embeds=embedded, use_cache=False)
            best = llava.lm_head(hidden.last_hidden_state[:, -1]).argmax(-1)
            if int(best) == words.eos_token_id:
                break
            ids_out.append(int(best))
            embedded = torch.cat((embedded, llava.get_input_embeddings()(best)[:, None]), 1)
        return str(words.decode(ids_out)).strip()


BUDGET = 8
SHOWN = (
    FULL,
    Configuration("random", BUDGET),
    Configuration("reference", BUDGET),
    Configuration("state", BUDGET),
)


@dataclass(frozen=True)
class ExamplePicture:
    """Path and question of the picture, with answers as served and as recomputed."""

    path: str
    question: str
    expected: str
    served: dict[str, str]
    offline: dict[str, str]

    @property
    def agrees(self) -> bool:
        """Whether the recomputed answers equal those of the server."""
        return self.served == self.offline


def choose_example(examples: Sequence[Example], measured: Measured) -> int:
    """The first question that a random keep fails and the others answer.

    Where there is none: the first that the full model answers, or the first of all.
    """
    contrasting, answered = [], []
    for number, example in enumerate(examples):
        right = [_is_right(example, measured.answer(c, number)) for c in SHOWN]
        if right == [True, False, True, True] and example.kind in ("digit", "colour", "shape"):
            contrasting.append(number)
        if right[0]:
            answered.append(number)
    return next(iter((*contrasting, *answered)), 0)


def draw_example(settings: Settings, questions: Questions, measured: Measured) -> ExamplePicture:
    """Recompute the kept tokens of one question and write ``kept.png``."""
    number = choose_example(questions.examples, measured)
    example = questions.examples[number]
    image = Image.open(io.BytesIO(png(example.image))).convert("RGB")
    explainer = Explainer(settings.model, settings.text_tower, settings.state, settings.dtype)
    explanations = [explainer.explain(image, example.question, c) for c in SHOWN]
    panels = [
        picture.Panel(
            title=NAMES[item.configuration.keep],
            detail=f"{len(item.kept)} tokens",
            kept=None if item.configuration == FULL else item.kept,
            owners=item.owners,
            answer=item.answer,
            right=_is_right(example, item.answer),
        )
        for item in explanations
    ]
    path = settings.out / "kept.png"
    picture.draw(image, example.question, panels, example.evidence).save(path, optimize=True)
    return ExamplePicture(
        path=_shorten(path),
        question=example.question,
        expected=example.answer,
        served={c.label: measured.answer(c, number).strip() for c in SHOWN},
        offline={item.configuration.label: item.answer for item in explanations},
    )


def _is_right(example: Example, answer: str) -> bool:
    return grade_answers([example], [answer]).accuracy == 1.0


def _shorten(path: Path) -> str:
    """Relative to the working directory, if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
