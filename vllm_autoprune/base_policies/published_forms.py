"""Each base policy as published and as implemented here, with every difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "pre-LLM selection", "pre-LLM selection and merge", "pre-projector merge", "in-LLM pruning"
]


@dataclass(frozen=True, slots=True)
class PublishedForm:
    """One method: its published form, its form as a base policy, and the differences.

    ``layers``: language-model layers that run over all N tokens before the selection, with default
    parameters on a model of 32 layers. The fields of the three backbones name the recipe used.
    """

    published: Kind
    served: str
    llava: str
    llava_next: str
    qwen2_5_vl: str
    ours: tuple[str, ...]
    layers: int = 0


_CONSECUTIVE = "positions are consecutive; as published, they have gaps"
_GLOBAL = "across all tiles"
_PORTED = "as in LightCompress"

_PER_TILE = "per tile"
_UNCONFIRMED = "per tile (ours)"
_FLOAT32 = "computed in float32; the published code keeps the dtype of the features"
_MASKED = "chosen tokens are masked, so that none repeats"

PUBLISHED_FORMS: dict[str, PublishedForm] = {
    "cdpruner": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="CLIP relevance, sign -1",
        llava_next="per tile, normalised across tiles",
        qwen2_5_vl="relevance to the mean input embedding of the question, sign +1 (ours)",
        ours=(
            "chosen tokens are masked and, beyond the rank of the kernel, the rest is chosen by "
            "relevance; the published loop produces NaN there",
            "constant relevance counts as 1 for every token instead of 0 / 0",
        ),
    ),
    "divprune": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published",
        llava_next="per tile (ours); `tile_scope: global` is as published",
        qwen2_5_vl="on merged tokens (ours), or on encoder outputs with `rank_at: merger_in`",
        ours=("chosen tokens are masked: the published code may repeat one among duplicates",),
    ),
    "visionzip": PublishedForm(
        published="pre-projector merge",
        served="K rows",
        llava="as published",
        llava_next="per tile",
        qwen2_5_vl="mean attention; `patch_only` alone (ours)",
        ours=(
            "`patch_only` (default) keeps a patch instead of the [CLS] row, `false` does not",
            "rows without merged tokens are the model's projected tokens",
            "at budgets without a published split, 10 of 64 rows are contextual",
        ),
    ),
    "prumerge_plus": PublishedForm(
        published="pre-projector merge",
        served="K rows: K - 1 tokens and the sum of the dropped ones",
        llava="as published",
        llava_next="per tile",
        qwen2_5_vl="mean attention (ours)",
        ours=(
            "K is given; the published count depends on the image. Outliers come first, then "
            "evenly spaced tokens, where EffiVLM-Bench takes the top ones",
            "`drop_extra` keeps K tokens and no extra row; so does K = 1 per tile",
            "nothing is trained, unlike the paper's model",
        ),
    ),
    "trim": PublishedForm(
        published="pre-projector merge",
        served="K rows: K - 1 patches and the mean of the others",
        llava="as published",
        llava_next="per tile, each with its own mean (ours)",
        qwen2_5_vl="as CDPruner there (ours)",
        ours=(
            "the mean of a text's CLIP segments, which the published code truncates at 77 tokens; "
            "without the chat template",
            "K = 1 per tile keeps a patch: the published code fails",
        ),
    ),
    "dart": PublishedForm(
        published="in-LLM pruning",
        served="selection by the states and keys of layer 1, or by input embeddings",
        llava="as the LightCompress port (no code by the authors)",
        llava_next=_GLOBAL,
        qwen2_5_vl=_PORTED,
        layers=2,
        ours=(
            "4 pivots, and (K - 4) / 8 tokens for each of 8, the remainder to the first; as "
            "published, 4 + 8 floor(K / 8)",
            _CONSECUTIVE,
            "pivots in the order of a CPython set, as published, but hash collisions by position",
            "an instruction of fewer than four tokens repeats its strongest",
        ),
    ),
    "fastv": PublishedForm(
        published="in-LLM pruning",
        served="selection by the attention of layer 1",
        llava="as published",
        llava_next=_GLOBAL,
        qwen2_5_vl=_PORTED,
        layers=1,
        ours=(_CONSECUTIVE,),
    ),
    "pyramiddrop": PublishedForm(
        published="in-LLM pruning",
        served="selection by the attention of layer L / 4, the published first stage",
        llava="one stage of the published three",
        llava_next=_GLOBAL,
        qwen2_5_vl=_PORTED,
        layers=8,
        ours=(
            "one stage keeps K tokens; as published, half of the rest after layers 8, 16 and 24",
            "the default layer is the first stage, a quarter of the depth",
        ),
    ),
    "sparsevlm": PublishedForm(
        published="in-LLM pruning",
        served="selection by the raters' attention in layer 2",
        llava="one stage of the published three, first version",
        llava_next=_GLOBAL,
        qwen2_5_vl=_PORTED,
        layers=2,
        ours=(
            "one stage keeps K tokens; as published, fixed counts after layers 2, 6 and 15",
            "no recycling by default; `recycle` uses up to half of K for cluster means of the rows "
            "that enter the model",
            "no noise on the density: of equally dense tokens the lower index is denser",
            "if no text token is above the mean, as with a single one, all of them are raters",
        ),
    ),
    "cen_divprune": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published",
        llava_next="per tile, mean and weights of each tile",
        qwen2_5_vl="`scale_variance: true, weight: sigmoid` in a state with `rank_at: merger_in`, "
        "as published",
        ours=(
            "after the paper, which has no code; its epsilons are 1e-6 each",
            "the first token is DivPrune's on the centred distance, without the weight",
            "from a weighted distance of 1e-6 on, the rest comes by weight",
        ),
    ),
    "cen_cdpruner": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published; CDPruner's relevance, sign -1",
        llava_next="per tile, normalised across tiles",
        qwen2_5_vl="as `cen_divprune`; relevance as CDPruner there (ours)",
        ours=(
            "after the paper, which has no code; its epsilons are 1e-6 each",
            "beyond the rank of the kernel the rest comes by weight, as in CDPruner",
            "`relevance: false` reads no question; its core goes on by relevance from the same "
            "residuals",
        ),
    ),
    "scope": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published",
        llava_next=_UNCONFIRMED,
        qwen2_5_vl="mean attention; patches before the merger (ours)",
        ours=(
            _FLOAT32,
            _MASKED,
            "a zero row has cosine 0; the published code gives NaN",
            "from a gain of 1e-9 on, the rest comes by attention",
        ),
    ),
    "mmtok": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published: infrequent words of the question, each alone",
        llava_next=_PER_TILE,
        qwen2_5_vl="`tau_text: 0.01`, as published; the words as on LLaVA (ours; published: the "
        "whole question)",
        ours=(
            _MASKED,
            "from a gain of 1e-12 on, the rest comes by index",
            "patches of padding are not excluded: images are not padded here",
            "`words: false` covers the image alone; its core is continued with the words",
        ),
    ),
    "prunesid": PublishedForm(
        published="pre-LLM selection",
        served="K rows",
        llava="`mode: cls` is as published",
        llava_next="per tile; the published code writes kept rows to wrong places",
        qwen2_5_vl="`mode: qwen`, the rule published for Qwen2-VL",
        ours=(
            "an exact decomposition; the published one is randomised without a seed. It waits for "
            "the GPU, as no other policy does",
            "`mode: patch` (default), or K = 1 per tile, keeps a patch instead of the [CLS] row",
            "groups of more than 1000 tokens keep their order, unlike the published code",
            "fewer than four tokens are one group; K is given, not found from the image",
        ),
    ),
    "holov": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published",
        llava_next="per tile (ours; published: base view and map as one sequence)",
        qwen2_5_vl="mean attention; bands as published there",
        ours=(
            "features are not read: the published variance term leaves quotas unchanged",
            "a band of one token has the same factor as others",
            "what a band has no room for goes to others; the published code adds zero rows",
        ),
    ),
    "fsr": PublishedForm(
        published="pre-LLM selection and merge",
        served="K rows; in a core and in a delta, selection alone",
        llava="CDPruner's relevance, sign -1 (the paper writes plus)",
        llava_next="per tile, normalised across tiles (ours)",
        qwen2_5_vl="`alpha: 0.0`: the paper leaves relevance out there",
        ours=(
            "after the paper's formulas: its repository is empty",
            "a focus of more than K tokens is cut at K, and nothing is scanned",
            "where all priorities are 0 the scan begins as DivPrune",
            "scan and merge read projected features; merged rows do not depend on the order",
            "`alpha: 0.0` reads no question; its core is continued by priority alone",
        ),
    ),
    "idpruner": PublishedForm(
        published="pre-LLM selection",
        served="the same rule with another importance",
        llava="[CLS] attention (ours)",
        llava_next="per tile; published: over all images of a request",
        qwen2_5_vl="mean attention (ours)",
        ours=(
            "published importance is a trained network's; its accuracy does not carry over",
            "attention is the mean over heads; published code that adds 1e-6 sums it",
            "`importance: relevance` reads the question, for a delta",
        ),
    ),
}
"""Every base policy by name."""
