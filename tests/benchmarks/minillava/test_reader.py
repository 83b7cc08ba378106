"""The split model agrees with transformers; selections keep the right tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from benchmarks.minillava.evaluate import Case, build_report, evaluate, headroom
from benchmarks.minillava.reader import Reader
from benchmarks.minillava.render import normalize_pixels
from benchmarks.minillava.selections import (
    keep_all,
    keep_evidence,
    keep_random,
    selections,
)
from benchmarks.minillava.split import Example, draw_examples
from benchmarks.minillava.vocabulary import prompt
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.tokens import VisualTokens


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> Reader:
    return Reader(checkpoint)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return draw_examples("validation", 2)[:24]


@pytest.fixture(scope="module")
def tokens(reader: Reader, examples: list[Example]) -> VisualTokens:
    return reader.encode(examples)


def test_full_tokens_give_the_logits_of_the_whole_model(
    checkpoint: Path, reader: Reader, examples: list[Example], tokens: VisualTokens
) -> None:
    model = LlavaForConditionalGeneration.from_pretrained(
        checkpoint / "llava", dtype=torch.bfloat16, attn_implementation="eager"
    )
    example = examples[0]
    scores = reader.score_answers(examples[:1], tokens.features[:1])
    image = reader.tokenizer.convert_tokens_to_ids("<image>")
    text = prompt(example.question).replace("<image>", "<image>" * 144) + f" {example.answer}"
    ids = torch.tensor([[*reader.tokenizer(text).input_ids, reader.tokenizer.eos_token_id]])
    assert int((ids == image).sum()) == 144
    with torch.no_grad():
        logits = model(
            input_ids=ids, pixel_values=normalize_pixels(example.image[None])
        ).logits.float()
    answer = len(reader.tokenizer(f" {example.answer}").input_ids) + 1
    expected = logits[0, :-1].log_softmax(-1)[-answer:].gather(1, ids[0, -answer:, None]).sum()

    assert float(scores.logprob[0]) == pytest.approx(float(expected), abs=0.05)


def test_the_prefix_is_what_the_language_model_computes(
    reader: Reader, tokens: VisualTokens
) -> None:
    prefix = tokens.require_language()
    embeds = prefix.embeddings()
    whole = reader.llava.model.language_model(
        inputs_embeds=embeds, output_hidden_states=True, output_attentions=True, use_cache=False
    )
    last, rows = prefix.layers - 1, prefix.text.shape[1]

    assert torch.allclose(prefix.states(0), whole.hidden_states[1], atol=0.02)
    assert torch.allclose(prefix.normed(last), whole.last_hidden_state, atol=0.05)
    for layer in (0, last):
        attention = whole.attentions[layer][:, :, -rows:].float()
        assert torch.allclose(prefix.attention(layer), attention, atol=0.01)
    assert torch.equal(embeds[:, prefix.start : prefix.start + 144], tokens.features)
    assert prefix.keys(1).shape[2] == embeds.shape[1]


def test_the_oracle_keeps_the_evidence_and_random_does_not(
    examples: list[Example], tokens: VisualTokens
) -> None:
    marked = VisualTokens(
        torch.arange(144.0).expand(len(examples), 144)[:, :, None].clone(), tokens.grid
    )
    oracle = keep_evidence(examples, marked, 12)[:, :, 0].long().tolist()
    blind = keep_random(examples, marked, 12)[:, :, 0].long().tolist()

    for example, row in zip(examples, oracle, strict=True):
        assert set(example.evidence[:12]) <= set(row)
        assert row == sorted(set(row)) and len(row) == 12
    assert any(not set(e.evidence) <= set(row) for e, row in zip(examples, blind, strict=True))
    assert keep_random(examples, marked, 12).equal(keep_random(examples, marked, 12))
    assert keep_all(examples, marked, 144) is marked.features


@pytest.mark.parametrize("name", sorted(BASE_POLICIES))
def test_every_registered_policy_gives_k_finite_rows(
    name: str, examples: list[Example], tokens: VisualTokens
) -> None:
    for budget in (8, 16):
        rows = selections()[name](examples, tokens, budget)
        assert rows.shape == (len(examples), budget, tokens.features.shape[2])
        assert rows.isfinite().all()


def test_a_report_compares_the_same_questions(reader: Reader, examples: list[Example]) -> None:
    names = ("cdpruner", "divprune", "random", "oracle")
    cases = [Case("full", keep_all, 144)]
    cases += [Case(name, selections()[name], 8) for name in names]
    results, hits = evaluate(reader, examples, cases)

    assert all(len(result.right) == len(examples) for result in results.values())
    assert len(hits) == sum(bool(example.evidence) for example in examples)
    difference = headroom(examples, results, ["cdpruner", "divprune"], 8)
    assert {difference.best, difference.worst} == {"cdpruner", "divprune"}
    report = build_report(examples, results, hits)
    assert report["questions"] == len(examples)
