"""The reader gives the probabilities of the model's own forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.minillava.split import Example
from benchmarks.miniqwen.reader import Reader
from benchmarks.miniqwen.sizes import TOKEN, shrink_size
from benchmarks.miniqwen.split import convert_image, draw_examples, image_size
from benchmarks.miniqwen.vocabulary import prompt


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> Reader:
    reader = Reader(checkpoint)
    reader.model.float()
    return reader


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return [one for one in draw_examples("search", 2) if one.image_id == 1]


@torch.no_grad()
def _logprob(reader: Reader, example: Example, longest_edge: int) -> float:
    """Log-probability of the answer by the model's own forward pass."""
    inputs = reader.processor(
        text=[prompt(example.question)],
        images=[convert_image(example.image)],
        images_kwargs={"size": {"shortest_edge": TOKEN * TOKEN, "longest_edge": longest_edge}},
        return_tensors="pt",
    )
    answer = reader.processor.tokenizer(f" {example.answer}<|im_end|>", return_tensors="pt")
    expected = answer["input_ids"]
    kinds = torch.zeros_like(expected)
    for name, part in (
        ("input_ids", expected),
        ("attention_mask", torch.ones_like(expected)),
        ("mm_token_type_ids", kinds),
    ):
        inputs[name] = torch.cat((inputs[name], part.to(inputs[name].dtype)), 1)
    length = expected.shape[1]
    logits = reader.model(**inputs).logits[0, -length - 1 : -1].log_softmax(-1)
    return float(logits.gather(1, expected[0, :, None]).sum())


@pytest.mark.parametrize("divisor", [1, 4])
def test_answers_score_as_in_the_whole_model(
    reader: Reader, examples: list[Example], divisor: int
) -> None:
    budget = image_size(examples[0].image).tokens // divisor
    image = reader.encode(examples[0].image, budget)
    assert image.size == shrink_size(image_size(examples[0].image), budget)
    scores = reader.score_answers(examples, image)
    for example, logprob in zip(examples, scores.logprob.tolist(), strict=True):
        assert logprob == pytest.approx(_logprob(reader, example, budget * TOKEN**2), abs=0.01)


def test_all_tokens_kept_score_as_none_dropped_and_fewer_do_not(
    reader: Reader, examples: list[Example]
) -> None:
    image = reader.encode(examples[0].image)
    every = torch.arange(image.size.tokens).expand(len(examples), -1)
    whole = reader.score_answers(examples, image).logprob
    assert torch.equal(reader.score_answers(examples, image, every).logprob, whole)
    some = reader.score_answers(examples, image, every[:, ::2]).logprob
    assert not torch.allclose(some, whole)
