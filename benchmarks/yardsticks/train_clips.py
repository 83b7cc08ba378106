"""``python -m benchmarks.yardsticks.train_clips``: teach mini-Qwen3-VL to watch clips.

It begins with the committed weights. Mergers and language model are trained, but not the rest of
the tower. Prompts are those that vLLM 0.32 writes for Qwen3-VL.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from benchmarks.yardsticks import training
from benchmarks.yardsticks.clips import DIRECTIONS, FRAMES, SIZE, Clip
from benchmarks.yardsticks.examples import CHECKPOINTS, PROMPT, keep_evidence
from benchmarks.yardsticks.pages import MERGE
from benchmarks.yardsticks.questions import BRIEF, SEEN, Question, Questions

_LEAD, _IMAGE, _REST = PROMPT["miniqwen"]
_BETWEEN, _BEHIND = _REST.split("{question}")
# Views of a clip, whose weights a recipe has: numbers of drawn frames and of frames that are seen.
_VIEWS = (*((frames, frames) for frames in FRAMES), (8, 4), (8, 2))
# Number of texts about each clip.
_TEXTS = 36
# Share of the last stage's steps in which tokens are dropped. The share of kept tokens is then
# log-uniform between _LEAST and 1.
_DROPOUT = 0.6
_LEAST = 1 / 16
# Fields of auxiliary classifiers of single tokens, and their numbers of classes, by the number of
# layers before them. event: a shape stays, has moved or came; direction: where it moves; visit:
# which visitor it is.
_AUXILIARY: dict[int, dict[str, int]] = {
    2: {"event": 3},
    4: {"direction": 4, "visit": 4},
}


def _open_model() -> Qwen3VLForConditionalGeneration:
    """mini-Qwen3-VL with patches of one frame instead of two.

    A picture is encoded as two equal frames, so the sum of both kernels gives the same states.
    """
    model = Qwen3VLForConditionalGeneration(
        AutoConfig.from_pretrained(CHECKPOINTS["clips"])
    )
    weights = load_file(CHECKPOINTS["miniqwen"] / "model.safetensors")
    name = "model.visual.patch_embed.proj.weight"
    weights[name] = weights[name].float().sum(2, keepdim=True)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and missing == ["lm_head.weight"]
    model.tie_weights()
    for part in (model.model.visual, model.model.language_model):
        part.config._attn_implementation = training.IN_PLACE
    return model


def lay_out(tokenizer: Tokenizer, frames: int) -> tuple[Tensor, Tensor, int]:
    """Token ids (L,) before a question, their positions (3, L), and the next position.

    There is one frame a second. It follows the text of its time, and has positions like a picture.
    """
    (image_token,) = tokenizer.encode(_IMAGE).ids
    ids = list[int]()
    positions = list[Tensor]()
    position = 0

    def write(text: str) -> None:
        nonlocal position
        new = tokenizer.encode(text).ids
        positions.append(torch.arange(position, position + len(new)).expand(3, -1))
        ids.extend(new)
        position += len(new)

    grid = SIZE.rotary_positions(torch.arange(SIZE.tokens))
    write(_LEAD)
    for frame in range(frames):
        write(f"<{frame}.0 seconds>")
        write("<|vision_start|>")
        ids.extend([image_token] * SIZE.tokens)
        positions.append(position + grid)
        position += max(SIZE.rows, SIZE.columns)
        write("<|vision_end|>")
    write(_BETWEEN)
    return torch.tensor(ids), torch.cat(positions, 1), position


def _label_tokens(clip: Clip) -> Tensor:
    """Labels (3, T * N) of the tokens of a clip: the fields of `_AUXILIARY`, in their order."""
    labels = torch.full((3, len(clip.frames) * SIZE.tokens), training.UNLABELLED)
    visits = {guest.name: number for number, guest in enumerate(clip.visitors)}
    direction = DIRECTIONS.index(clip.direction)
    for frame, scene in enumerate(clip.frames):
        for thing in scene.things:
            event = 0
            towards = training.UNLABELLED
            visit = training.UNLABELLED
            if thing.name in visits:
                event = 2
                visit = visits[thing.name]
            elif thing.name == clip.mover.name:
                event = 1
                towards = direction
                if (thing.row, thing.column) == (clip.mover.row, clip.mover.column):
                    continue
            elif not frame:
                continue
            tokens = [frame * SIZE.tokens + token for token in scene.patches[thing]]
            labels[:, tokens] = torch.tensor([[event], [towards], [visit]])
    return labels


def _draw_texts(
    recipe: training.Recipe, stage: int, clip: Clip, rng: random.Random
) -> list[Question]:
    """Draw what is asked about a clip: phrases in the first stage, then also questions."""
    source = Questions(rng, clip, SIZE.cells, BRIEF)
    phrases = recipe.phrases["clips"]
    if not stage:
        return source.draw_texts(phrases, _TEXTS, " {question}")
    texts = source.draw_texts(phrases, _TEXTS // 2, " {question}")
    source = replace(source, wordings=SEEN)
    form = "{question}" + _BEHIND
    return texts + source.draw_texts(recipe.questions["clips"], _TEXTS // 2, form)


@dataclass(frozen=True)
class _Batch:
    """B clips of T frames, what is asked about each, and which tokens are kept.

    images (B * T, 3, H, W) uint8; selection (B, T * N) bool.
    """

    images: Tensor
    clips: Sequence[Clip]
    texts: Sequence[Sequence[Question]]
    selection: Tensor

    @classmethod
    def draw(cls, recipe: training.Recipe, stage: int, seed: int) -> _Batch:
        """Draw a batch of a stage; batches of a step have equally many frames and kept tokens."""
        settings = recipe.stages[stage]
        rng = random.Random(seed)
        # The same in all batches of a step.
        common = random.Random(seed // training.PARTS)
        share = 1.0
        drawn_frames, frames = common.choices(_VIEWS, settings.views)[0]
        if settings.name == "thinned" and common.random() < _DROPOUT:
            share = _LEAST ** common.random()
        drawn = list[tuple[Tensor, Clip]]()
        while len(drawn) < settings.images:
            clip = Clip.draw(rng, drawn_frames).sample(frames)
            if clip.visitors:
                drawn.append(clip.render(rng.randrange(2**31)))
        questions = [_draw_texts(recipe, stage, clip, rng) for _, clip in drawn]
        selection = torch.zeros(len(drawn), frames * SIZE.tokens, dtype=torch.bool)
        for index, (texts, row) in enumerate(zip(questions, selection, strict=True)):
            tokens = keep_evidence(rng, texts, int(share * len(row)), len(row))
            row[tokens] = True
            questions[index] = [text for text in texts if {*text.evidence} <= {*tokens}]
        images, clips = zip(*drawn, strict=True)
        return cls(torch.cat(images), clips, questions, selection)


class _Prompts(NamedTuple):
    """Kept tokens of the B prompts of a batch, L each, without their questions."""

    embeds: Tensor
    """(B, L, D), the input of the language model."""
    positions: Tensor
    """(3, B, L); dropped tokens do not move the others."""
    visual: Tensor
    """(B, L) bool: which are visual tokens."""
    levels: Sequence[Tensor]
    """Deepstack rows (M, D) of all M kept visual tokens, which the next layers add."""


class _Trainer:
    """mini-Qwen3-VL, auxiliary classifiers of its visual tokens, and the loss of a batch."""

    def __init__(self, run: training.Training) -> None:
        self._recipe = run.recipe
        self._tokenizer = Tokenizer.from_file(
            str(CHECKPOINTS["clips"] / "tokenizer.json")
        )
        (self._image_token,) = self._tokenizer.encode(_IMAGE).ids
        self.model = _open_model()
        torch.manual_seed(run.seed)
        width = self.model.model.language_model.config.hidden_size
        self.heads = [
            training.DenseHeads(width, fields) for fields in _AUXILIARY.values()
        ]

    def loss(self, stage: int, seed: int, step: int) -> Tensor:
        """Cross entropy of the answers of a batch, and of the auxiliary labels of tokens."""
        batch = _Batch.draw(self._recipe, stage, seed)
        frames = len(batch.clips[0].frames)
        ids, positions, start = lay_out(self._tokenizer, frames)
        texts = training.TextBatch.build(
            self._tokenizer, batch.texts, start, "<|im_end|>", "<|endoftext|>"
        )
        prompts = self._encode_prompts(batch, ids, positions)
        length = texts.texts.shape[1]
        loss, output = texts.answer_loss(
            self.model,
            self.model.model.language_model,
            prompts.embeds,
            prompts.positions,
            visual_pos_masks=torch.nn.functional.pad(prompts.visual, (0, length)),
            deepstack_visual_embeds=prompts.levels,
            output_hidden_states=True,
        )
        for auxiliary in self._label_losses(batch, prompts, output.hidden_states):
            loss = loss + auxiliary
        return loss

    def _encode_prompts(
        self, batch: _Batch, ids: Tensor, positions: Tensor
    ) -> _Prompts:
        """Encode the clips, then drop tokens; ``ids``, ``positions`` are from :func:`lay_out`."""
        patches = SIZE.split_patches(batch.images)
        grid = torch.tensor(
            [[1, SIZE.rows * MERGE, SIZE.columns * MERGE]] * len(patches)
        )
        encoded = self.model.model.visual(patches.flatten(0, 2), grid_thw=grid)
        batch_size = len(batch.clips)
        visual = ids.eq(self._image_token).expand(batch_size, -1)
        embed = self.model.get_input_embeddings()
        embeds = embed(ids).expand(batch_size, -1, -1).clone()
        embeds[visual] = encoded.pooler_output
        keep_mask = torch.ones_like(visual).masked_scatter(visual, batch.selection)

        def keep(values: Tensor) -> Tensor:
            """Drop rows of values (B, tokens, ...), which gives (B, L, ...)."""
            return values[keep_mask].unflatten(0, (batch_size, -1))

        kept_positions = positions[:, None].expand(-1, batch_size, -1)[:, keep_mask]
        return _Prompts(
            keep(embeds),
            kept_positions.unflatten(1, (batch_size, -1)),
            keep(visual),
            [level[batch.selection.flatten()] for level in encoded.deepstack_features],
        )

    def _label_losses(
        self, batch: _Batch, prompts: _Prompts, states: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Auxiliary losses of kept tokens; ``states`` (B, L + text, D) are of all layers."""
        batch_size = len(batch.clips)
        labels = torch.stack([_label_tokens(clip) for clip in batch.clips], 1)
        labels = labels[:, batch.selection].unflatten(1, (batch_size, -1))
        targets_by_layer = labels.split([len(fields) for fields in _AUXILIARY.values()])
        for layer, head, targets in zip(
            _AUXILIARY, self.heads, targets_by_layer, strict=True
        ):
            tokens = states[layer][:, : prompts.embeds.shape[1]][prompts.visual]
            if (targets >= 0).any():
                yield head.loss(tokens.unflatten(0, (batch_size, -1)), targets, {})


def train(run: training.Training) -> None:
    """Train all stages and write the checkpoint."""
    trainer = _Trainer(run)
    model = trainer.model
    tower = model.model.visual
    model.requires_grad_(False)
    for part in (tower.merger, tower.deepstack_merger_list, model.model.language_model):
        part.requires_grad_(True)
    trained = {"model": model, "heads": torch.nn.ModuleList(trainer.heads)}
    for stage in range(len(run.recipe.stages)):
        run.run_stage(stage, trained, partial(trainer.loss, stage))
    run.write_checkpoint(CHECKPOINTS["clips"], {"": model})


if __name__ == "__main__":
    raise SystemExit(training.Training.start("clips", train))
