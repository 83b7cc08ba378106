"""Golden cases as the records that base policies read.

Where a published method works on one tile at a time, each tile of a case is an image of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.golden.case import Case
from vllm_autoprune.tpdsl.prefix import RecordedPrefix, attention_rows
from vllm_autoprune.tpdsl.tokens import (
    Grid,
    Instruction,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)


def _unchanged(rows: Tensor) -> Tensor:
    return rows  # no projector: merged rows are compared before projection


def cdpruner(case: Case) -> VisualTokens:
    """One image of B tiles: relevance is normalised over all of them together."""
    features = case.given("image_features")
    tiles, count, width = features.shape
    patches = case.given("image_embeds", cast=False).reshape(1, tiles * count, -1)
    instruction = _clip(patches, case.given("text_embeds", cast=False))
    joined = features.reshape(1, tiles * count, width)
    return VisualTokens(joined, Grid(1, count, tiles), instruction=instruction)


def divprune(case: Case) -> VisualTokens:
    """One image."""
    return _plain(case.given("features")[None])


def visionzip(case: Case) -> VisualTokens:
    """B images with attention summed over heads; only its order matters to the published code."""
    hidden, keys = case.given("hidden"), case.given("key_metric")
    tower = TowerStates(hidden[:, 1:], keys[:, 1:], _unchanged, cls=hidden[:, :1])
    attention = case.given("cls_attn").sum(dim=1)
    return _plain(hidden[:, 1:], cls_attention=attention, tower=tower)


def prumerge(case: Case) -> VisualTokens:
    """B images: the [CLS] row of single-head attention, the mean over queries without a [CLS]."""
    hidden, queries, keys = case.given("hidden"), case.given("q"), case.given("k")
    scores = queries @ keys.transpose(1, 2) / keys.shape[2] ** 0.5
    attention = scores.softmax(dim=-1)
    first = 1 if case.recipe["gen"] == "prumerge" else 0
    row = attention[:, 0, 1:] if first else attention.mean(dim=1)
    patches, known = hidden[:, first:], keys[:, first:]
    tower = TowerStates(patches, known, _unchanged, next_layer=NextLayer(row, known))
    return _plain(patches, tower=tower)


def trim(case: Case) -> VisualTokens:
    """One image of B tiles, over all of which the outliers are counted."""
    hidden = case.given("hidden")
    tiles, count, width = hidden.shape
    joined = hidden.reshape(1, tiles * count, width)
    patches = case.given("image_embeds", cast=False).reshape(1, tiles * count, -1)
    return VisualTokens(
        joined,
        Grid(1, count, tiles),
        instruction=_clip(patches, case.given("text_embeds", cast=False)),
        tower=TowerStates(joined, joined, _unchanged),
    )


def dart(case: Case) -> VisualTokens:
    """One sequence with the keys of a layer and the normed states behind it."""
    states = case.given("normed_hidden")
    recording = replace(_text(case), recorded_normed=states, recorded_keys=case.given("keys"))
    return _image(case, states, recording)


def fastv(case: Case) -> VisualTokens:
    """One sequence with the last row of its attention, the only row that FastV reads."""
    last = case.given("attn_last_row")
    return _image(case, last.mean(dim=0)[None, :, None], _last_row(case, last))


def pdrop(case: Case) -> VisualTokens:
    """One sequence with attention of its last position, made from query and keys."""
    keys = case.given("keys")
    last = attention_rows(case.given("q_last"), keys)[:, 0]
    return _image(case, keys.mean(dim=0)[None], _last_row(case, last))


def sparsevlm(case: Case) -> VisualTokens:
    """One sequence with input embeddings, attention of the text rows and a layer's output."""
    recording = replace(
        _text(case),
        recorded_embeddings=case.given("embeds"),
        recorded_attention=case.given("attn_text_rows")[None],
        recorded_states=case.given("layer_out"),
    )
    return _image(case, case.given("embeds"), recording)


def cen_divprune(case: Case) -> VisualTokens:
    """B images."""
    return _plain(case.given("features"))


def cen_cdpruner(case: Case) -> VisualTokens:
    """One image of B tiles: relevance is normalised over all of them together."""
    return _tiles_with_relevance(case)


def scope(case: Case) -> VisualTokens:
    """B images of encoder tokens, with attention summed over heads."""
    features = case.given("features")
    attention = case.given("cls_attn", cast=False).sum(dim=1)
    return replace(_plain(features, cls_attention=attention), encoder=features)


def mmtok(case: Case) -> VisualTokens:
    """B images with the same words."""
    features, words = case.given("features"), case.given("text_tokens")
    used = torch.ones(len(features), len(words), dtype=torch.bool)
    return replace(
        _plain(features),
        encoder=case.given("encoder"),
        words=Words(words.expand(len(features), -1, -1), used),
    )


def prunesid(case: Case) -> VisualTokens:
    """B images with attention summed over heads; only its order matters to the published code."""
    hidden = case.given("hidden")
    tower = TowerStates(hidden[:, 1:], hidden[:, 1:], _unchanged, cls=hidden[:, :1])
    attention = case.given("cls_attn", cast=False).sum(dim=1)
    plain = _plain(hidden[:, 1:], cls_attention=attention, tower=tower)
    return replace(plain, encoder=hidden[:, 1:])


def holov(case: Case) -> VisualTokens:
    """B images."""
    attention = case.given("cls_attn", cast=False).mean(dim=1)
    return _plain(case.given("features"), cls_attention=attention)


def fsr(case: Case) -> VisualTokens:
    """One image of B tiles: relevance is normalised over all of them together."""
    tokens = _tiles_with_relevance(case)
    attention = case.given("cls_attn", cast=False).mean(dim=1).reshape(1, -1)
    return replace(tokens, cls_attention=attention)


def idpruner(case: Case) -> VisualTokens:
    """B images with attention summed over heads."""
    attention = case.given("cls_attn", cast=False).sum(dim=1)
    return _plain(case.given("features"), cls_attention=attention)


def _tiles_with_relevance(case: Case) -> VisualTokens:
    features = case.given("features")
    tiles, count, width = features.shape
    patches = case.given("image_embeds", cast=False).reshape(1, tiles * count, -1)
    instruction = _clip(patches, case.given("text_embeds", cast=False))
    instruction = replace(instruction, sign=case.recipe.get("sign", -1))
    joined = features.reshape(1, tiles * count, width)
    return VisualTokens(joined, Grid(1, count, tiles), instruction=instruction)


def _plain(
    features: Tensor, cls_attention: Tensor | None = None, tower: TowerStates | None = None
) -> VisualTokens:
    grid = Grid(1, features.shape[1])
    return VisualTokens(features, grid, cls_attention=cls_attention, tower=tower)


def plain_instruction(patches: Tensor, text: Tensor) -> Instruction:
    """CLIP's embeddings ``(B, N, C)`` with one text segment ``(B, C)`` an image."""
    used = torch.ones(len(text), 1, dtype=torch.bool)
    return Instruction(patches, text[:, None], used, sign=-1)


def _clip(patches: Tensor, text: Tensor) -> Instruction:
    used = torch.ones(1, text.shape[0], dtype=torch.bool)
    return Instruction(patches, text[None], used, sign=-1)


def _text(case: Case) -> RecordedPrefix:
    """An empty recording: positions of image and text."""
    return RecordedPrefix(case.recipe["sys"], torch.ones(1, case.recipe["txt"], dtype=torch.bool))


def _last_row(case: Case, last: Tensor) -> RecordedPrefix:
    """A recording of the last row of attention ``(H, L)``; all other rows are NaN."""
    rows = last.new_full((1, last.shape[0], case.recipe["txt"], last.shape[1]), torch.nan)
    rows[0, :, -1] = last
    return replace(_text(case), recorded_attention=rows)


def _image(case: Case, sequence: Tensor, language: RecordedPrefix) -> VisualTokens:
    """The visual span of a sequence ``(1, L, D)``, with the recording of the whole sequence."""
    visual = sequence.narrow(1, case.recipe["sys"], case.recipe["N"])
    return VisualTokens(visual, Grid(1, case.recipe["N"]), language=language)
