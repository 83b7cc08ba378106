"""The committed checkpoint: names, size, equal vision towers, accuracy."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor, AutoTokenizer, CLIPModel

from benchmarks.minillava.evaluate import FULL, Case, evaluate
from benchmarks.minillava.reader import Reader
from benchmarks.minillava.render import normalize_pixels
from benchmarks.minillava.selections import ORACLE, RANDOM, keep_all, selections
from benchmarks.minillava.split import CHECKPOINT, CLIP, LLAVA, draw_examples
from benchmarks.minillava.vocabulary import prompt

PATCHES = 144


def test_the_checkpoint_stays_below_15_megabytes() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.rglob("*") if file.is_file()) < 15e6


def test_weights_bear_the_names_of_llava_hf() -> None:
    tensors = load_file(LLAVA / "model.safetensors")
    for name in (
        "vision_tower.vision_model.embeddings.class_embedding",
        "vision_tower.vision_model.pre_layrnorm.weight",
        "vision_tower.vision_model.encoder.layers.4.mlp.fc2.bias",
        "multi_modal_projector.linear_1.weight",
        "multi_modal_projector.linear_2.bias",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.5.self_attn.q_proj.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    ):
        assert name in tensors
    prefixes = ("vision_tower.vision_model.", "multi_modal_projector.", "language_model.")
    assert all(name.startswith(prefixes) for name in tensors)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_both_folders_hold_the_same_vision_tower() -> None:
    llava = load_file(LLAVA / "model.safetensors")
    clip = load_file(CLIP / "model.safetensors")
    shared = [name for name in clip if name.startswith("vision_model.")]

    assert len(shared) > 80
    assert all(torch.equal(clip[name], llava[f"vision_tower.{name}"]) for name in shared)


def test_the_text_tower_states_its_sign_and_pools_on_the_end_token() -> None:
    clip = CLIPModel.from_pretrained(CLIP)
    tokenizer = AutoTokenizer.from_pretrained(CLIP)
    ids = tokenizer("Is there a red square in the picture?").input_ids

    assert clip.config.autoprune_relevance_sign == 1
    assert clip.config.text_config.eos_token_id == tokenizer.eos_token_id == ids[-1]
    assert tokenizer.eos_token_id not in ids[:-1]


def test_processor_and_chat_template_make_the_prompt_that_training_used() -> None:
    processor = AutoProcessor.from_pretrained(LLAVA)
    example = draw_examples("test", 1)[0]
    content = [{"type": "image"}, {"type": "text", "text": example.question}]
    chat = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=example.image, text=text, return_tensors="pt")

    assert text == prompt(example.question)
    assert int((inputs.input_ids == processor.image_token_id).sum()) == PATCHES
    expected = normalize_pixels(example.image[None]).float()
    assert torch.allclose(inputs.pixel_values.float(), expected, atol=0.02)


def test_held_out_questions_are_answered_right_at_full_tokens() -> None:
    examples = draw_examples("validation", 3)

    results, _ = evaluate(Reader(CHECKPOINT), examples, [Case(FULL, keep_all, PATCHES)])

    right = results[f"{FULL} {PATCHES}"].right
    assert sum(right) / len(right) >= 0.9


@pytest.mark.slow
def test_the_oracle_beats_policies_and_policies_beat_random() -> None:
    keep = selections()
    cases = [Case(name, keep[name], 8) for name in (ORACLE, "cdpruner", "fastv", RANDOM)]

    results, _ = evaluate(Reader(CHECKPOINT), draw_examples("validation", 20), cases)

    share = {name: sum(result.right) / len(result.right) for name, result in results.items()}
    assert share[f"{ORACLE} 8"] > share["cdpruner 8"] + 0.05
    assert share["cdpruner 8"] > share[f"{RANDOM} 8"] + 0.15
    assert share["cdpruner 8"] > share["fastv 8"] + 0.15
