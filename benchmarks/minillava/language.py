"""The projector and the Llama that reads it: batches and loss of their training stage.

Knows nothing about how the vision tower was trained; it reads frozen penultimate patches.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from benchmarks.minillava.questions import Question, training_questions
from benchmarks.minillava.scenes import PATCHES, Scene, draw
from benchmarks.minillava.towers import WIDTH, pixels
from benchmarks.minillava.vocabulary import AFTER_IMAGE, BEFORE_IMAGE, BEGIN, END, PAD, token_id

LANGUAGE_WIDTH = 192
VOCABULARY = 448
QUESTIONS_PER_IMAGE = 8
# Blocks of a sequence: the shared image prefix, and padding that only sees itself.
_PREFIX, _PADDING = -1, -2


class Projector(nn.Module):
    """LLaVA-1.5's two linear layers with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(WIDTH, LANGUAGE_WIDTH)
        self.linear_2 = nn.Linear(LANGUAGE_WIDTH, LANGUAGE_WIDTH)

    def forward(self, patches: Tensor) -> Tensor:
        """(B, K, 128) → (B, K, 192)."""
        projected: Tensor = self.linear_2(F.gelu(self.linear_1(patches)))
        return projected


def lean_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **unused: object,
) -> tuple[Tensor, None]:
    """Eager attention (B, H, T, D) → (B, T, H, D), in bf16 throughout.

    Scaling the queries instead of the weights and no detour through fp32 saves several passes
    over (B, H, T, T), a good part of a step on a CPU.
    """
    weights = (query * scaling) @ key.transpose(2, 3)
    weights = (weights + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("lean", lean_attention)


def language_config(tokenizer: Tokenizer) -> LlamaConfig:
    """The sizes of the language model."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=LANGUAGE_WIDTH,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=2048,
        bos_token_id=token_id(tokenizer, BEGIN),
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
        tie_word_embeddings=False,
        attn_implementation="lean",
    )


def language_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A freshly initialised language model."""
    return LlamaForCausalLM(language_config(tokenizer))


@dataclass(frozen=True)
class LanguageBatch:
    """Sequences of a prefix ("USER: " and K image tokens) and eight question blocks.

    `kept` (B, K) raster patches ascending; `before` (P,) ids; `texts`, `labels` (B, L);
    `positions` (B, P + K + L); `blocks` likewise, -1 for the prefix and -2 for padding.
    """

    values: Tensor
    kept: Tensor
    before: Tensor
    texts: Tensor
    labels: Tensor
    positions: Tensor
    blocks: Tensor
    full: bool


def draw_budget(seed: int) -> int:
    """How many image tokens a step keeps: all, or log-uniform between 4 and 144."""
    rng = random.Random(seed)
    if rng.random() < 0.3:
        return PATCHES
    return int(math.exp(rng.uniform(math.log(4), math.log(PATCHES))))


def _ask(rng: random.Random, scene: Scene, budget: int) -> tuple[list[Question], list[int]]:
    """Questions and the patches kept for them; the evidence of what is asked survives."""
    number = QUESTIONS_PER_IMAGE
    if budget == PATCHES:
        return training_questions(rng, scene, scene.things, number, True), list(range(PATCHES))
    things = rng.sample(scene.things, min(len(scene.things), max(1, budget // 6)))
    thin = rng.random() < 0.3
    wanted: list[int] = []
    spare: list[int] = []
    for thing in things:
        patches = rng.sample(thing.patches, len(thing.patches))
        keep = rng.randint(1, len(patches)) if thin else len(patches)
        wanted += patches[:keep]
        spare += patches[keep:]
    wanted = wanted[:budget]
    taken = set(wanted) | set(spare)
    others = [patch for patch in range(PATCHES) if patch not in taken]
    rng.shuffle(others)
    kept = (wanted + others + spare)[:budget]
    return training_questions(rng, scene, things, number, False), sorted(kept)


def language_batch(seed: int, size: int, tokenizer: Tokenizer, budget: int) -> LanguageBatch:
    """Draw one batch of the language stage that keeps `budget` image tokens."""
    drawn = draw(seed, size)
    rng = random.Random(seed + 1)
    before = tokenizer.encode(BEFORE_IMAGE).ids
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    start = len(before) + budget
    rows: list[tuple[list[int], list[int], list[int], list[int]]] = []
    kept: list[list[int]] = []
    for scene in drawn.scenes:
        questions, patches = _ask(rng, scene, budget)
        kept.append(patches)
        texts: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for block, question in enumerate(questions):
            asked = tokenizer.encode(AFTER_IMAGE.format(question=question.text)).ids
            answer = [*tokenizer.encode(" " + question.answer).ids, end]
            texts += asked + answer
            # A position is labelled with the token that follows it.
            labels += [-100] * (len(asked) - 1) + answer + [-100]
            positions += range(start, start + len(asked) + len(answer))
            blocks += [block] * (len(asked) + len(answer))
        rows.append((texts, labels, positions, blocks))
    longest = max(len(row[0]) for row in rows)
    fills = (pad, -100, 0, _PADDING)
    columns = [
        torch.tensor([row[part] + [fill] * (longest - len(row[part])) for row in rows])
        for part, fill in enumerate(fills)
    ]
    ahead = torch.arange(start).expand(size, start)
    return LanguageBatch(
        values=pixels(drawn.images),
        kept=torch.tensor(kept),
        before=torch.tensor(before),
        texts=columns[0],
        labels=columns[1],
        positions=torch.cat((ahead, columns[2]), 1),
        blocks=torch.cat((torch.full((size, start), _PREFIX), columns[3]), 1),
        full=budget == PATCHES,
    )


def _mask(blocks: Tensor) -> Tensor:
    """Additive bf16 mask (B, 1, T, T): the prefix and one's own block, never the future."""
    length = blocks.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = blocks[:, :, None] == blocks[:, None, :]
    prefix = (blocks == _PREFIX)[:, None, :]
    allowed = (same | prefix) & causal
    mask = torch.zeros(allowed.shape, dtype=torch.bfloat16).masked_fill_(~allowed, -1e9)
    return mask[:, None]


def language_loss(
    model: LlamaForCausalLM, projector: Projector, batch: LanguageBatch, patches: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Cross entropy on answer tokens; patches (B, 144, 128) come from the frozen tower."""
    rows = torch.arange(len(batch.kept))[:, None]
    image = projector(patches[rows, batch.kept])
    embed = model.get_input_embeddings()
    before = embed(batch.before).expand(len(rows), -1, -1)
    embeds = torch.cat((before, image, embed(batch.texts)), 1)
    hidden = model.model(
        inputs_embeds=embeds,
        attention_mask=_mask(batch.blocks),
        position_ids=batch.positions,
        use_cache=False,
    ).last_hidden_state
    hidden = hidden[:, -batch.texts.shape[1] :]
    asked = batch.labels >= 0
    logits = model.lm_head(hidden[asked]).float()
    labels = batch.labels[asked]
    loss = F.cross_entropy(logits, labels)
    # Every other labelled token is an answer, the ones between are the end of it.
    right = float((logits.argmax(-1) == labels)[::2].float().mean())
    return loss, {"loss": float(loss.detach()), "full" if batch.full else "kept": right}
