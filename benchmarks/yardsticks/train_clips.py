"""``python -m benchmarks.yardsticks.train_clips``: teach mini-Qwen3-VL to watch clips.

It begins with the committed weights. Mergers and language model are trained, the rest of the tower
is not. Prompts are those that vLLM 0.32 writes for Qwen3-VL.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from benchmarks.yardsticks import training
from benchmarks.yardsticks.clips import FRAMES, SIZE, Clip
from benchmarks.yardsticks.examples import CHECKPOINTS, PROMPT
from benchmarks.yardsticks.pages import MERGE
from benchmarks.yardsticks.questions import BRIEF, SEEN, Question, Questions

_LEAD, _IMAGE, _REST = PROMPT["miniqwen"]
_BETWEEN, _BEHIND = _REST.split("{question}")
# How often the clips of a step have each number of frames, and how much is asked about each clip.
_SHARES, _TEXTS = (0.8, 0.2), 36


def _open_model() -> Qwen3VLForConditionalGeneration:
    """mini-Qwen3-VL with patches of one frame instead of two.

    The two frames of a picture are the same, so the sum of both kernels gives the same states.
    """
    model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(CHECKPOINTS["clips"]))
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
    ids, positions, at = list[int](), list[Tensor](), 0

    def write(text: str) -> None:
        nonlocal at
        new = tokenizer.encode(text).ids
        positions.append(torch.arange(at, at + len(new)).expand(3, -1))
        ids.extend(new)
        at += len(new)

    place = torch.arange(SIZE.tokens)
    grid = torch.stack((torch.zeros_like(place), place // SIZE.columns, place % SIZE.columns))
    write(_LEAD)
    for frame in range(frames):
        write(f"<{frame}.0 seconds>")
        write("<|vision_start|>")
        ids.extend([image] * SIZE.tokens)
        positions.append(at + grid)
        at += max(SIZE.rows, SIZE.columns)
        write("<|vision_end|>")
    write(_BETWEEN)
    return torch.tensor(ids), torch.cat(positions, 1), at


def train(run: training.Training) -> None:
    """Train both stages and write the checkpoint."""
    words = Tokenizer.from_file(str(CHECKPOINTS["clips"] / "tokenizer.json"))
    (image,) = words.encode(_IMAGE).ids
    model = _open_model()
    tower, language, embed = (
        model.model.visual, model.model.language_model, model.get_input_embeddings()
    )  # fmt: skip

    def answer_loss(number: int, seed: int, step: int) -> Tensor:
        """Cross entropy on answer tokens about clips of one number of frames."""
        stage, rng = run.recipe.stages[number], random.Random(seed)
        # Both batches of a step have the same number.
        frames = random.Random(seed // training.PARTS).choices(FRAMES, _SHARES)[0]
        drawn = [Clip.draw(rng, frames).render(rng.randrange(2**31)) for _ in range(stage.images)]
        asked = list[list[Question]]()
        for _, clip in drawn:
            phrases = Questions(rng, clip, SIZE.cells, BRIEF)
            count = _TEXTS // (1 + number)
            texts = phrases.draw_texts(run.recipe.phrases["clips"], count, " {question}")
            if number:
                source, form = replace(phrases, wordings=SEEN), "{question}" + _BEHIND
                texts += source.draw_texts(run.recipe.questions["clips"], count, form)
            asked.append(texts)
        ids, positions, start = lay_out(words, frames)
        batch = training.TextBatch.build(words, asked, start, "<|im_end|>", "<|endoftext|>")

        patches = SIZE.split_patches(torch.cat([images for images, _ in drawn]))
        grid = torch.tensor([[1, SIZE.rows * MERGE, SIZE.columns * MERGE]] * len(patches))
        encoded = tower(patches.flatten(0, 2), grid_thw=grid)
        count, behind = batch.texts.shape
        visual = ids.eq(image).expand(count, -1)
        embeds = embed(ids).expand(count, -1, -1).clone()
        embeds[visual] = encoded.pooler_output
        states = language(
            inputs_embeds=torch.cat((embeds, embed(batch.texts)), 1),
            attention_mask=batch.mask(len(ids)),
            position_ids=torch.cat(
                (positions[:, None].expand(-1, count, -1), batch.positions.expand(3, -1, -1)), 2
            ),
            visual_pos_masks=torch.nn.functional.pad(visual, (0, behind)),
            deepstack_visual_embeds=encoded.deepstack_features,
            use_cache=False,
        ).last_hidden_state
        return batch.loss(model.lm_head, states[:, len(ids) :])

    model.requires_grad_(False)
    for part in (tower.merger, tower.deepstack_merger_list, language):
        part.requires_grad_(True)
    for number in range(len(run.recipe.stages)):
        run.run_stage(number, {"model": model}, partial(answer_loss, number))
    run.write_checkpoint(CHECKPOINTS["clips"], {"": model})


if __name__ == "__main__":
    training.Training.start("clips", train)
