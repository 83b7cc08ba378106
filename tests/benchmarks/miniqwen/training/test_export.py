"""The checkpoint runs with transformers, and its chat template gives the prompts of training."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks.miniqwen.training.language import split_template
from benchmarks.miniqwen.vocabulary import BEFORE_IMAGE, IMAGE_TOKEN, prompt


def test_the_chat_template_gives_the_prompt(checkpoint: Path) -> None:
    processor = AutoProcessor.from_pretrained(checkpoint)
    content = [{"type": "image"}, {"type": "text", "text": "Is the word bird on the page?"}]
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text == prompt("Is the word bird on the page?")


def test_an_answer_in_a_request_has_the_tokens_of_training(checkpoint: Path) -> None:
    processor = AutoProcessor.from_pretrained(checkpoint)
    user = {"role": "user", "content": [{"type": "text", "text": "What number is next to bird?"}]}
    for answer in ("13", " 13"):
        messages = [user, {"role": "assistant", "content": answer}]
        text = processor.apply_chat_template(messages, continue_final_message=True)
        ids = processor.tokenizer(text, add_special_tokens=False).input_ids
        assert ids[-2:] == processor.tokenizer(" 13", add_special_tokens=False).input_ids


def test_prompts_have_the_tokens_of_training(checkpoint: Path) -> None:
    tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
    between, template = split_template()
    parts = (BEFORE_IMAGE, IMAGE_TOKEN, between, template.format(question="Count the crosses."))
    whole = tokenizer(prompt("Count the crosses.")).input_ids
    assert whole == [token for part in parts for token in tokenizer(part).input_ids]


def test_any_image_size_runs(checkpoint: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(checkpoint)
    image = torch.zeros(3, 100, 210, dtype=torch.uint8)
    inputs = processor(text=[prompt("What is there?")], images=[image], return_tensors="pt")
    assert inputs["image_grid_thw"].tolist() == [[1, 8, 16]]
    output = model.generate(**inputs, do_sample=False, max_new_tokens=2)
    assert output.shape[1] <= inputs["input_ids"].shape[1] + 2
