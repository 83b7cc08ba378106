"""``python -m benchmarks.yardsticks.train_clips``: teach mini-Qwen3-VL to watch clips.

It begins with the committed weights. Mergers and language model are trained, the rest of the tower
is not. Prompts are those that vLLM 0.32 writes for Qwen3-VL.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

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
# Numbers of frames that the views of a recipe are shares of: drawn, and of these seen.
_VIEWS = (*((frames, frames) for frames in FRAMES), (8, 4), (8, 2))
# How much is asked about each clip.
_TEXTS = 36
# In how many steps of the last stage tokens are dropped; the share that stays is log-uniform from
# the least to 1.
_DROPOUT = 0.6
_LEAST = 1 / 16
# Fields of auxiliary classifiers of single tokens, by the number of layers before them: whether a
# shape stays, has moved or came; the direction that it moves in, and which visitor it is.
_AUXILIARY: dict[int, dict[str, int]] = {
    2: {"event": 3},
    4: {"direction": 4, "visit": 4},
}


def _open_model() -> Qwen3VLForConditionalGeneration:
    """mini-Qwen3-VL with patches of one frame instead of two.

    The two frames of a picture are the same, so the sum of both kernels gives the same states.
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
    """Ids (L,) before a question, their positions (3, L), and the position that follows.

    Each frame stands behind its time, one a second, and has the positions of a picture.
    """
    (image,) = tokenizer.encode(_IMAGE).ids
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
        ids.extend([image] * SIZE.tokens)
        positions.append(position + grid)
        position += max(SIZE.rows, SIZE.columns)
        write("<|vision_end|>")
    write(_BETWEEN)
    return torch.tensor(ids), torch.cat(positions, 1), position


def _label_tokens(clip: Clip) -> Tensor:
    """Labels (3, T * N) of the tokens of a clip, in the order of `_AUXILIARY`."""
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


@dataclass(frozen=True)
class _Batch:
    """Clips of one number of frames, what is asked about each, and which tokens stay (B, T * N)."""

    images: Tensor
    clips: Sequence[Clip]
    texts: Sequence[Sequence[Question]]
    selection: Tensor

    @classmethod
    def draw(cls, recipe: training.Recipe, number: int, seed: int) -> _Batch:
        """Draw a batch of a stage; both batches of a step have as many frames and tokens."""
        stage = recipe.stages[number]
        rng = random.Random(seed)
        common = random.Random(seed // training.PARTS)
        share = 1.0
        drawn_frames, frames = common.choices(_VIEWS, stage.views)[0]
        if stage.name == "thinned" and common.random() < _DROPOUT:
            share = _LEAST ** common.random()
        drawn = list[tuple[Tensor, Clip]]()
        questions = list[list[Question]]()
        while len(drawn) < stage.images:
            clip = Clip.draw(rng, drawn_frames).sample(frames)
            if clip.visitors:
                drawn.append(clip.render(rng.randrange(2**31)))
        for _, clip in drawn:
            phrases = Questions(rng, clip, SIZE.cells, BRIEF)
            count = _TEXTS // 2 if number else _TEXTS
            texts = phrases.draw_texts(recipe.phrases["clips"], count, " {question}")
            if number:
                source = replace(phrases, wordings=SEEN)
                form = "{question}" + _BEHIND
                texts += source.draw_texts(recipe.questions["clips"], count, form)
            questions.append(texts)
        selection = torch.zeros(len(drawn), frames * SIZE.tokens, dtype=torch.bool)
        for index, (texts, row) in enumerate(zip(questions, selection, strict=True)):
            tokens = keep_evidence(rng, texts, int(share * len(row)), len(row))
            row[tokens] = True
            questions[index] = [text for text in texts if {*text.evidence} <= {*tokens}]
        images, clips = zip(*drawn, strict=True)
        return cls(torch.cat(images), clips, questions, selection)


def train(run: training.Training) -> None:
    """Train all stages and write the checkpoint."""
    words = Tokenizer.from_file(str(CHECKPOINTS["clips"] / "tokenizer.json"))
    (image,) = words.encode(_IMAGE).ids
    model = _open_model()
    tower = model.model.visual
    language = model.model.language_model
    embed = model.get_input_embeddings()
    torch.manual_seed(run.seed)
    width = language.config.hidden_size
    heads = [training.DenseHeads(width, fields) for fields in _AUXILIARY.values()]

    def answer_loss(stage: int, seed: int, step: int) -> Tensor:
        """Cross entropy of the answers of a batch, and of the auxiliary labels of tokens.

        All clips of a batch have the same number of frames.
        """
        drawn = _Batch.draw(run.recipe, stage, seed)
        selection = drawn.selection
        frames = len(drawn.clips[0].frames)
        ids, positions, start = lay_out(words, frames)
        batch = training.TextBatch.build(
            words, drawn.texts, start, "<|im_end|>", "<|endoftext|>"
        )

        patches = SIZE.split_patches(drawn.images)
        grid = torch.tensor(
            [[1, SIZE.rows * MERGE, SIZE.columns * MERGE]] * len(patches)
        )
        encoded = tower(patches.flatten(0, 2), grid_thw=grid)
        count = len(batch.texts)
        visual = ids.eq(image).expand(count, -1)
        embeds = embed(ids).expand(count, -1, -1).clone()
        embeds[visual] = encoded.pooler_output
        # Tokens that are dropped leave the positions of all others as they are.
        keep_mask = torch.ones_like(visual).masked_scatter(visual, selection)
        kept_positions = (
            positions[:, None]
            .expand(-1, count, -1)[:, keep_mask]
            .unflatten(1, (count, -1))
        )
        embeds, visual = (
            part[keep_mask].unflatten(0, (count, -1)) for part in (embeds, visual)
        )
        loss, states = batch.answer_loss(
            model,
            language,
            embeds,
            kept_positions,
            visual_pos_masks=torch.nn.functional.pad(visual, (0, batch.texts.shape[1])),
            deepstack_visual_embeds=[
                level[selection.flatten()] for level in encoded.deepstack_features
            ],
            output_hidden_states=True,
        )
        labels = torch.stack([_label_tokens(clip) for clip in drawn.clips], 1)
        labels = labels[:, selection].unflatten(1, (count, -1))
        for (layer, fields), head in zip(_AUXILIARY.items(), heads, strict=True):
            targets = labels[: len(fields)]
            labels = labels[len(fields) :]
            clip_states = states.hidden_states[layer][:, : embeds.shape[1]]
            tokens = clip_states[visual]
            if (targets >= 0).any():
                loss = loss + head.loss(tokens.unflatten(0, (count, -1)), targets, {})
        return loss

    model.requires_grad_(False)
    for part in (tower.merger, tower.deepstack_merger_list, language):
        part.requires_grad_(True)
    trained = {"model": model, "heads": torch.nn.ModuleList(heads)}
    for number in range(len(run.recipe.stages)):
        run.run_stage(number, trained, partial(answer_loss, number))
    run.write_checkpoint(CHECKPOINTS["clips"], {"": model})


if __name__ == "__main__":
    training.Training.start("clips", train)
