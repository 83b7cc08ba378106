"""Training of the small models."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.yardsticks import train_minillava, train_miniqwen, training
from benchmarks.yardsticks.examples import CHECKPOINTS, LLAVA
from benchmarks.yardsticks.pages import MERGE, Size
from benchmarks.yardsticks.scenes import PATCHES

QWEN = CHECKPOINTS["miniqwen"]


def test_steps_lower_the_loss_but_not_by_a_gradient_that_is_not_finite() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    optimiser, losses = training._Optimiser({"model": model}, peak=0.01), []
    for step in range(150):
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs.bfloat16()).float() - inputs[:, :8].sin()).square().mean()
        loss.backward()
        optimiser.step(1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    before = [parameter.clone() for parameter in model.parameters()]
    (model(inputs.bfloat16()).sum() * float("inf")).backward()
    optimiser.step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_question_sees_the_image_but_no_other_question() -> None:
    torch.manual_seed(0)
    words = Tokenizer.from_file(str(LLAVA / "tokenizer.json"))
    *_, projector, model = train_minillava.build_models()
    model, projector = model.bfloat16(), projector.bfloat16()
    _, kept, batch = train_minillava.draw_batch(5, 2, words)
    before = torch.tensor(words.encode("USER: ").ids)
    patches = torch.randn(2, PATCHES, projector.linear_1.in_features).bfloat16()
    block = batch.blocks == 0
    alone = replace(batch, labels=batch.labels.where(block, -1))
    others = replace(alone, texts=batch.texts.where(block, batch.texts.flip(1)))
    loss = train_minillava.language_loss
    with torch.no_grad():
        value = loss(model, projector, patches, kept, before, alone)
        beside = loss(model, projector, patches, kept, before, others)
        other_image = loss(model, projector, patches.flip(1), kept, before, alone)
    assert torch.equal(value, beside)
    assert not torch.equal(value, other_image)


@torch.no_grad()
@pytest.mark.parametrize("seen", [Size(6, 9), Size(4, 6)])
def test_a_block_has_the_logits_of_the_models_own_forward_pass(seen: Size) -> None:
    words = Tokenizer.from_file(str(QWEN / "tokenizer.json"))
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        QWEN, dtype=torch.float32, attn_implementation="eager"
    )
    pictures = train_miniqwen._draw_pictures(5, 1, 1, Size(6, 9), seen)
    batch = train_miniqwen.draw_batch(5, words, pictures, seen.tokens, 3, 2)
    logits = model.lm_head(train_miniqwen.language_states(model, batch, pictures)[0])
    frames = pictures.patches.float().flatten(1, 2).unflatten(2, (3, 1, -1))
    frames = frames.expand(-1, -1, -1, 2, -1).flatten(2)
    grid = torch.tensor([[1, seen.rows * MERGE, seen.columns * MERGE]])
    (image_token,) = words.encode("<|image_pad|>").ids
    for picture in range(2):
        for block in range(5):
            part = batch.texts.blocks[picture] == block
            text = batch.texts.texts[picture, part]
            image = torch.full((seen.tokens,), image_token)
            ids = torch.cat((batch.before, image, batch.after, text))[None]
            expected = model(
                input_ids=ids,
                pixel_values=frames[picture],
                image_grid_thw=grid,
                mm_token_type_ids=(ids == image_token).int(),
            ).logits[0, -len(text) :]
            torch.testing.assert_close(logits[picture, part], expected, atol=2e-2, rtol=1e-2)


STEPS = {
    "minillava": {"reading": 3.170, "towers": 27.419, "phrases": 6.596, "questions": 4.854},
    "miniqwen": {
        "reading": 25.093, "tower": 28.957, "naming": 7.721, "phrases": 9.302, "questions": 8.283,
    },
}  # fmt: skip
"""Loss of the first step of every stage, as with the optimiser that trained what is committed."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(STEPS))
def test_one_seed_gives_one_checkpoint(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = train_minillava if name == "minillava" else train_miniqwen
    # Three images show every kind of label; more of them only take longer.
    stages = tuple(stage.model_copy(update={"images": 3}) for stage in program.RECIPE.stages)
    monkeypatch.setattr(program, "RECIPE", program.RECIPE.model_copy(update={"stages": stages}))
    digests = []
    for out in (tmp_path / "out", tmp_path / "again"):
        program.train(training.Run(out, steps_scale=0.0005))
        # Any change of what is drawn, labelled or asked shows in these figures.
        log = re.findall(r"^\[(\w+)\] 1/1 loss=(\S+)", capsys.readouterr().out, re.MULTILINE)
        assert {stage: float(loss) for stage, loss in log} == pytest.approx(STEPS[name], rel=0.02)
        files = sorted(out.rglob("*.safetensors"))
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
        assert files and list(out.rglob("tokenizer.json")), "transformers and vLLM load the folder"
    assert digests[0] == digests[1]
