"""Turns are scored as the whole model answers the rendered chat; recall adds unseen tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from benchmarks.minillava.conversations.arms import FULL, Arm
from benchmarks.minillava.conversations.draw import Conversation, draw_conversations
from benchmarks.minillava.conversations.scoring import (
    choose_rows,
    encode_turns,
    recall_by_question,
    score_turns,
)
from benchmarks.minillava.reader import Reader
from benchmarks.minillava.render import normalize_pixels
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.executor.refine import refine
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.tokens import VisualTokens

K, K_R = 8, 4


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> Reader:
    return Reader(checkpoint)


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return draw_conversations("validation", 3)


@pytest.fixture(scope="module")
def turns(reader: Reader, conversations: list[Conversation]) -> list[VisualTokens]:
    return encode_turns(reader, conversations)


def _chat(conversation: Conversation) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []
    for number, turn in enumerate(conversation):
        image = [] if number else [{"type": "image"}]
        content = [*image, {"type": "text", "text": turn.question}]
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def test_all_tokens_give_the_logits_of_the_whole_model_on_the_rendered_chat(
    checkpoint: Path,
    reader: Reader,
    conversations: list[Conversation],
    turns: list[VisualTokens],
) -> None:
    model = LlavaForConditionalGeneration.from_pretrained(
        checkpoint / "llava", dtype=torch.bfloat16, attn_implementation="eager"
    )
    conversation, tokenizer = conversations[0], reader.tokenizer
    text = tokenizer.apply_chat_template(_chat(conversation), tokenize=False)
    ids = torch.tensor([tokenizer(text.replace("<image>", "<image>" * 144)).input_ids])
    with torch.no_grad():
        logits = model(
            input_ids=ids, pixel_values=normalize_pixels(conversation[0].image[None])
        ).logits.float()
    following = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    ends = (ids[0] == tokenizer.eos_token_id).nonzero()[:, 0].tolist()

    scores = score_turns(reader, conversations, choose_rows(FULL, conversations, turns))

    for number, (end, turn) in enumerate(zip(ends, conversation, strict=True)):
        length = len(tokenizer(f" {turn.answer}").input_ids) + 1
        expected = following[end - length : end].sum()
        assert float(scores.logprob[0, number]) == pytest.approx(float(expected), abs=0.06)


def test_the_first_turn_is_scored_like_a_single_question(
    reader: Reader, conversations: list[Conversation], turns: list[VisualTokens]
) -> None:
    arm = Arm("minillava", K)
    rows = choose_rows(arm, conversations, turns)
    alone = reader.score_answers([one[0] for one in conversations], rows[0])

    scores = score_turns(reader, conversations, rows)

    assert torch.equal(
        rows[0], refine(materialize(load_state(arm.state or ""), K), turns[0]).features
    )
    assert torch.allclose(scores.logprob[:, 0], alone.logprob, atol=0.05)


@pytest.mark.parametrize("name", ["minillava", "minillava-split"])
def test_recall_brings_tokens_that_no_turn_before_has(name: str, turns: list[VisualTokens]) -> None:
    state = load_state(name)
    seen = refine(materialize(state, K), turns[0]).indices

    for tokens in turns[1:]:
        picks = recall_by_question(state, tokens, seen, K_R)
        assert picks.shape == (3, K_R)
        assert torch.equal(picks, picks.sort(1).values)
        seen = torch.cat((seen, picks), 1)

    assert all(len(set(row)) == K + 3 * K_R for row in seen.tolist())


def test_recalled_rows_depend_on_the_question_of_their_turn(
    conversations: list[Conversation], turns: list[VisualTokens]
) -> None:
    arm = Arm("minillava-split", K, K_R)
    rows = choose_rows(arm, conversations, turns)
    other = choose_rows(arm, conversations, [turns[0], turns[2], turns[1], turns[3]])

    assert [part.shape[1] for part in rows] == [K, K_R, K_R, K_R]
    assert torch.equal(rows[0], other[0]) and not torch.equal(rows[1], other[1])
    without = choose_rows(arm.without_recall(), conversations, turns)
    assert [part.shape[1] for part in without] == [K, 0, 0, 0]


def test_the_control_recalls_evidence_that_was_not_kept(
    conversations: list[Conversation], turns: list[VisualTokens]
) -> None:
    arm = Arm("minillava-split", K, 40, "evidence")
    rows = choose_rows(arm, conversations, turns)
    kept = refine(materialize(load_state("minillava-split"), K), turns[0]).indices.tolist()

    for number, conversation in enumerate(conversations):
        wanted = [patch for patch in conversation[1].evidence if patch not in kept[number]][:40]
        recalled = rows[1][number]
        for patch in wanted:
            assert (recalled == turns[1].features[number, patch]).all(1).any()
