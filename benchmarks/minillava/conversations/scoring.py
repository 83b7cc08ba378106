"""Answers of every turn with transformers: tokens are pruned in front of the language model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.minillava.conversations.arms import Arm
from benchmarks.minillava.conversations.draw import Conversation
from benchmarks.minillava.reader import Reader
from benchmarks.minillava.vocabulary import AFTER_IMAGE, BEFORE_IMAGE, LATER_TURN
from vllm_autoprune.ops.rowwise import gather_rows, mask_from_indices
from vllm_autoprune.tpdsl.base_policy import Given
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.executor.refine import refine, select_tokens
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens


@dataclass(frozen=True)
class TurnScores:
    """Scores ``(M, T)`` of the reference answers of M conversations.

    right: greedy decoding gives exactly the reference answer and then stops; logprob: natural
    logarithm of the probability of the answer and its end token.
    """

    right: Tensor
    logprob: Tensor


@torch.no_grad()
def choose_rows(
    arm: Arm, conversations: Sequence[Conversation], turns: Sequence[VisualTokens]
) -> list[Tensor]:
    """Rows of every turn for the language model: ``(M, K, D)``, then ``(M, K_r, D)`` each.

    The first turn keeps what its question chooses. A later one recalls tokens that no turn before
    it has, chosen by its own question, unmerged and in raster order.
    """
    first = turns[0]
    none = first.features[:, :0]
    if arm.state is None:
        return [first.features, *[none] * (len(turns) - 1)]
    state = load_state(arm.state)
    kept = refine(materialize(state, arm.budget), first)
    rows, seen = [kept.features], kept.indices
    for number, tokens in enumerate(turns[1:], 1):
        if not arm.recall:
            rows.append(none)
            continue
        examples = [conversation[number] for conversation in conversations]
        if arm.recall_by == "question":
            picks = recall_by_question(state, tokens, seen, arm.recall)
        else:
            wanted = [one.evidence if arm.recall_by == "evidence" else () for one in examples]
            seeds = [f"{one.image_id} {one.question}" for one in examples]
            picks = _recall_first(wanted, seeds, seen, arm.recall, tokens.count)
        rows.append(gather_rows(tokens.features, picks))
        seen = torch.cat((seen, picks), 1)
    return rows


def recall_by_question(
    state: PruningState, tokens: VisualTokens, seen: Tensor, count: int
) -> Tensor:
    """Indices ``(M, count)``, ascending, that a state chooses given the tokens seen ``(M, A)``."""
    policy = materialize(state, count, core=0)
    closed = mask_from_indices(seen, tokens.count)
    given = Given(seen, closed, closed, seen.shape[1])
    return select_tokens(policy, tokens, given).indices


def _recall_first(
    wanted: Sequence[Sequence[int]], seeds: Sequence[str], seen: Tensor, count: int, total: int
) -> Tensor:
    """Indices ``(M, count)``, ascending: the wanted tokens not seen yet, then random ones."""
    rows = []
    for first, seed, known in zip(wanted, seeds, seen.tolist(), strict=True):
        order = (*first, *random.Random(seed).sample(range(total), total))
        hidden = [token for token in dict.fromkeys(order) if token not in set(known)]
        rows.append(sorted(hidden[:count]))
    return torch.tensor(rows)


def encode_turns(reader: Reader, conversations: Sequence[Conversation]) -> list[VisualTokens]:
    """The visual tokens with the question of each turn."""
    return [reader.encode(turn) for turn in zip(*conversations, strict=True)]


@torch.no_grad()
def score_turns(
    reader: Reader, conversations: Sequence[Conversation], rows: Sequence[Tensor]
) -> TurnScores:
    """Score the answers of all turns at once; the history has the reference answers.

    ``rows`` are those of `choose_rows`; a turn without rows is rendered without an image.
    """
    embedded, spans = [], []
    for number, conversation in enumerate(conversations):
        parts, answers, length = [], [], 0
        for turn, example in enumerate(conversation):
            own = rows[turn][number]
            before, after = _turn_text(turn, example.question, len(own) > 0)
            answer = [*_ids(reader, f" {example.answer}"), reader.tokenizer.eos_token_id]
            ids = _ids(reader, after)
            head = _embed(reader, _ids(reader, before))
            parts += [head, own.to(head.dtype), _embed(reader, [*ids, *answer])]
            length += len(head) + len(own) + len(ids)
            # The token before the answer predicts its first token.
            answers.append((length - 1, answer))
            length += len(answer)
        embedded.append(torch.cat(parts))
        spans.append(answers)
    # Padded on the right, where the causal mask hides padding from every real token.
    padded = torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True)
    hidden = reader.llava.model.language_model(inputs_embeds=padded, use_cache=False)
    right, logprob = [], []
    for states, answers in zip(hidden.last_hidden_state, spans, strict=True):
        for start, answer in answers:
            logits = reader.llava.lm_head(states[start : start + len(answer)]).float()
            expected = torch.tensor(answer)
            right.append((logits.argmax(-1) == expected).all())
            logprob.append(logits.log_softmax(-1).gather(1, expected[:, None]).sum())
    shape = (len(conversations), len(conversations[0]))
    return TurnScores(torch.stack(right).view(shape), torch.stack(logprob).view(shape))


def _turn_text(turn: int, question: str, has_image: bool) -> tuple[str, str]:
    """The prompt of one turn before and after its image tokens, as the chat template renders it."""
    if turn == 0 or has_image:
        return BEFORE_IMAGE, AFTER_IMAGE.format(question=question)
    return "", LATER_TURN.format(question=question)


def _ids(reader: Reader, text: str) -> list[int]:
    ids: list[int] = reader.tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _embed(reader: Reader, ids: list[int]) -> Tensor:
    embedded: Tensor = reader.llava.get_input_embeddings()(torch.tensor(ids, dtype=torch.int64))
    return embedded
