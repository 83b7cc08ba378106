"""``python -m benchmarks.yardsticks.train_miniqwen``: train mini-Qwen3-VL from scratch.

Shapes of the model, tokenizer and processor are those of the committed checkpoint.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from benchmarks.yardsticks import naming, pages, pictures, training
from benchmarks.yardsticks.examples import CHECKPOINTS, PROMPT, keep_evidence
from benchmarks.yardsticks.pages import MERGE, Page, Size
from benchmarks.yardsticks.pictures import FIELD_WEIGHTS, FIELDS, Drawing
from benchmarks.yardsticks.questions import Question
from benchmarks.yardsticks.scenes import PATCH, WORDS, Scene
from benchmarks.yardsticks.training import Recipe

_QWEN = CHECKPOINTS["miniqwen"]
_LEAD, _, _REST = PROMPT["miniqwen"]
_BETWEEN, _BEHIND = _REST.split("{question}")

# Share of the last stage's full-size steps in which tokens are dropped.
_DROPOUT = 0.3
# The phrase stage starts with few shapes, words and tokens, and has all of them from this step on.
_CURRICULUM_STEPS = 300
_FEWEST = 4
_FEWEST_TOKENS = 16

_VISION_WIDTH = 128
_POSITION_GRID = 16
_POSITION_SCALE = 0.6
# Where heads of the first four layers attend at the start, in rows and columns from a patch; None
# is anywhere. Towers without such a start did not learn in 600 steps to attend to the neighbouring
# patch, which has the other digit of a number.
_LOOKS = (*[((0, -1), (0, 1), (-1, 0), (1, 0))] * 2, *[((0, None), (None, 0))] * 2)
_LOOK_STRENGTH = 33.0
_LOOK_FREQUENCIES = 3
_MATCH_SCALE = 1.7


@dataclass(frozen=True)
class _Pictures:
    """Pictures of one size, and the size at which the model sees them.

    patches (B, N, MERGE², 3 · PATCH²) and labels (fields, B, N · MERGE²) have the size that is
    seen.
    """

    size: Size
    seen: Size
    patches: Tensor
    labels: Tensor
    contents: Sequence[Scene | Page]

    def encode(self, tower: Qwen3VLVisionModel) -> tuple[Tensor, Tensor, list[Tensor]]:
        """States (B, P, Dv) of the last layer, rows (B, N, D) for layer 0, deepstack rows."""
        count = len(self.contents)
        # Both frames of a patch are equal.
        frames = (
            self.patches.flatten(0, 2).unflatten(1, (3, 1, -1)).expand(-1, -1, 2, -1)
        )
        seen = self.seen
        grid = torch.tensor([[1, seen.rows * MERGE, seen.columns * MERGE]] * count)
        encoded = tower(frames.flatten(1), grid_thw=grid)
        states, merged, *levels = (
            part.unflatten(0, (count, -1))
            for part in (
                encoded.last_hidden_state,
                encoded.pooler_output,
                *encoded.deepstack_features,
            )
        )
        return states, merged, levels

    def draw_texts(
        self, seed: int, recipe: Recipe, budget: int, phrases_only: bool
    ) -> tuple[Tensor, list[list[Question]]]:
        """Kept image tokens (B, K), and questions and phrases about every picture.

        With phrases only, tokens are dropped from pictures of full size; those of words, numbers
        and middles of shapes are dropped last. Otherwise tokens are dropped down to `budget`, and
        questions without their evidence are left out.
        """
        rng = random.Random(seed + 1)
        seen = self.seen
        questions = list[list[Question]]()
        selections = list[list[int]]()
        for content in self.contents:
            texts = pictures.draw_texts(
                rng, content, self.size, recipe, _BEHIND, phrases_only=phrases_only
            )
            tokens = list(range(seen.tokens))
            if phrases_only and seen == self.size:
                tokens = pictures.keep_parts(rng, content, seen, budget)
            elif budget < seen.tokens:
                tokens = keep_evidence(rng, texts, budget, seen.tokens)
                texts = [text for text in texts if set(text.evidence) <= set(tokens)]
            questions.append(texts)
            selections.append(tokens)
        return torch.tensor(selections), questions


def _draw_pictures(
    seed: int,
    views: Sequence[float],
    scene_count: int,
    page_count: int,
    plain: bool = False,
    maximum: int | None = None,
) -> _Pictures:
    """Draw scenes, then pages; with `plain` all pages are full ones.

    `views` are weights of seeing pictures with all tokens, or a half, fourth, eighth or sixteenth
    of them. `maximum` makes pictures easier: it limits the shapes of a scene and the words of a
    page.
    """
    # All batches of a step have the same sizes.
    rng = random.Random(seed // training.PARTS)
    size = rng.choice(pages.SIZES)
    divisor = rng.choices((1, 2, 4, 8, 16), views)[0]
    seen = size if divisor == 1 else size.limit(size.tokens // divisor)
    drawing = Drawing.draw(
        seed, size, scene_count, page_count, plain=plain, maximum=maximum
    )
    (height, width) = size.pixels
    (seen_height, seen_width) = seen.pixels
    scale = (seen_width / width, seen_height / height)
    items = pictures.scale_items(drawing.items, scale)
    contents = drawing.contents
    labels = pictures.label_patches(items, len(contents), _place_patches(seen))
    return _Pictures(size, seen, seen.split_patches(drawing.images), labels, contents)


def _place_patches(seen: Size) -> Tensor:
    """Centres (P, 2) in pixels, x and y, of all patches in the order of their tokens."""
    patch = torch.arange(seen.tokens * MERGE * MERGE)
    token = patch // (MERGE * MERGE)
    inner = patch % (MERGE * MERGE)
    row = token // seen.columns * MERGE + inner // MERGE
    column = token % seen.columns * MERGE + inner % MERGE
    return (torch.stack((column, row), 1) + 0.5) * PATCH


def _build_model() -> Qwen3VLForConditionalGeneration:
    """The untrained model, whose heads start by attending to neighbours and to tokens of a word."""
    model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(_QWEN))
    tower = model.model.visual
    language = model.model.language_model
    for part in (tower, language):
        part.config._attn_implementation = training.IN_PLACE
    with torch.no_grad():
        waves = training.position_waves(_POSITION_GRID, _VISION_WIDTH)
        tower.pos_embed.weight.copy_(waves * _POSITION_SCALE)
        # Biases of queries and keys that, with rotary positions, give heads their first direction.
        frequencies = tower.rotary_pos_emb.inv_freq[:_LOOK_FREQUENCIES]
        strength = _LOOK_STRENGTH**0.5
        for block, looks in zip(tower.blocks, _LOOKS, strict=False):
            bias = block.attn.qkv.bias.view(3, block.attn.num_heads, 2, 2, -1)
            # In a rotated vector, halves of pairs come first, then rows and columns, then
            # frequencies.
            for head, look in enumerate(looks):
                for axis, offset in enumerate(look):
                    if offset is not None:
                        angles = -frequencies * offset
                        bias[0, head, 0, axis, :_LOOK_FREQUENCIES] = strength
                        bias[1, head, 0, axis, :_LOOK_FREQUENCIES] = (
                            strength * angles.cos()
                        )
                        bias[1, head, 1, axis, :_LOOK_FREQUENCIES] = (
                            strength * angles.sin()
                        )
        naming.start_by_matching(language)
        for layer in language.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.fill_(_MATCH_SCALE)
    return model


class _Trainer:
    """The untrained model, and the loss of every stage of a recipe.

    A loss is that of one batch, given its seed and the number of the step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._words = Tokenizer.from_file(str(_QWEN / "tokenizer.json"))
        self.model = _build_model()
        self.heads = training.DenseHeads(_VISION_WIDTH, FIELDS)
        self._tower = self.model.model.visual
        self._embed = self.model.get_input_embeddings()

    def dense_loss(self, number: int, seed: int, step: int) -> Tensor:
        """Cross entropy on the dense labels of patches."""
        stage = self._recipe.stages[number]
        scenes = stage.images // 3
        drawn = _draw_pictures(
            seed, stage.views, scenes, stage.images - scenes, plain=number == 0
        )
        states, _, _ = drawn.encode(self._tower)
        return self.heads.loss(states, drawn.labels, FIELD_WEIGHTS)

    def naming_loss(self, seed: int, step: int) -> Tensor:
        """Loss that turns the mergers' rows into those of the words for what a picture shows."""
        stage = self._recipe.stages[2]
        drawn = _draw_pictures(seed, stage.views, stage.images, stage.images)
        _, rows, _ = drawn.encode(self._tower)
        return self._naming_loss(rows, drawn)

    def _naming_loss(self, rows: Tensor, drawn: _Pictures) -> Tensor:
        fields = dict(zip(FIELDS, drawn.labels, strict=True))
        return naming.naming_loss(self._words, rows, self._embed.weight, fields)

    def phrase_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to phrases; at first pictures are easy and tokens few."""
        progress = min(1.0, step / _CURRICULUM_STEPS) ** 2
        drawn = self._draw_halves(
            3, seed, _FEWEST + round((len(WORDS) - _FEWEST) * progress)
        )
        budget = drawn.seen.tokens
        if drawn.seen == drawn.size:
            budget = _FEWEST_TOKENS + round((budget - _FEWEST_TOKENS) * progress)
        return self._answer_loss(seed, drawn, budget, phrases_only=True)

    def question_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to questions and phrases; some steps drop tokens at full size."""
        rng = random.Random(seed // training.PARTS)
        drawn = self._draw_halves(4, seed)
        budget = drawn.seen.tokens
        if drawn.seen == drawn.size and rng.random() < _DROPOUT:
            budget = max(1, int(math.exp(rng.uniform(math.log(2), math.log(budget)))))
        return self._answer_loss(seed, drawn, budget, phrases_only=False)

    def _draw_halves(
        self, number: int, seed: int, maximum: int | None = None
    ) -> _Pictures:
        """Draw the pictures of a stage; half of them are scenes."""
        stage = self._recipe.stages[number]
        scenes = stage.images // 2
        return _draw_pictures(
            seed, stage.views, scenes, stage.images - scenes, maximum=maximum
        )

    def _answer_loss(
        self, seed: int, drawn: _Pictures, budget: int, phrases_only: bool
    ) -> Tensor:
        """Cross entropy on answer tokens after `budget` image tokens, and the loss of naming."""
        words = self._words
        embed = self._embed
        selection, questions = drawn.draw_texts(
            seed, self._recipe, budget, phrases_only
        )
        lead, tail = (
            torch.tensor(words.encode(text).ids) for text in (_LEAD, _BETWEEN)
        )
        seen = drawn.seen
        behind_image = len(lead) + max(seen.rows, seen.columns)
        start = behind_image + len(tail)
        texts = training.TextBatch.build(
            words, questions, start, "<|im_end|>", "<|endoftext|>"
        )
        _, image, levels = drawn.encode(self._tower)
        count = len(selection)
        rows = torch.arange(count)[:, None]
        leading, trailing = (embed(ids).expand(count, -1, -1) for ids in (lead, tail))
        prefix = torch.cat((leading, image[rows, selection], trailing), 1)
        visual = torch.zeros(count, prefix.shape[1] + texts.texts.shape[1]).bool()
        visual[:, len(lead) : len(lead) + selection.shape[1]] = True
        positions = (
            torch.arange(len(lead)).expand(3, count, -1),
            seen.rotary_positions(selection) + len(lead),
            torch.arange(behind_image, start).expand(3, count, -1),
        )
        loss, _ = texts.answer_loss(
            self.model,
            self.model.model.language_model,
            prefix,
            torch.cat(positions, 2),
            visual_pos_masks=visual,
            deepstack_visual_embeds=[
                level[rows, selection].flatten(0, 1) for level in levels
            ],
        )
        return loss + naming.NAMING_WEIGHT * self._naming_loss(image, drawn)


def train(run: training.Training) -> None:
    """Train all stages and write the checkpoint."""
    torch.manual_seed(run.seed)
    trainer = _Trainer(run.recipe)
    model = trainer.model
    tower = model.model.visual
    language = model.model.language_model
    mergers = (tower.merger, tower.deepstack_merger_list)
    patches = (tower.patch_embed, tower.pos_embed, tower.blocks)
    stages: Sequence[tuple[Sequence[nn.Module], Callable[[int, int], Tensor]]] = (
        (patches, partial(trainer.dense_loss, 0)),
        (patches, partial(trainer.dense_loss, 1)),
        ((*mergers, language.embed_tokens), trainer.naming_loss),
        ((*mergers, language), trainer.phrase_loss),
        ((*mergers, language), trainer.question_loss),
    )
    for number, (trained, loss) in enumerate(stages):
        model.requires_grad_(False)
        trainer.heads.requires_grad_(number < 2)
        for part in trained:
            part.requires_grad_(True)
        run.run_stage(number, {"model": model, "heads": trainer.heads}, loss)
    run.write_checkpoint(_QWEN, {"": model})


if __name__ == "__main__":
    raise SystemExit(training.Training.start("miniqwen", train))
