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


_ONE_STAGE = (
    "selects once, before prefill: every layer sees K tokens; as published, the first layers see "
    "all N. Scores are over [start, image, instruction], not the whole chat template"
)
_CONSECUTIVE = "positions are consecutive; as published, they have gaps"
_GLOBAL = "across all tiles"
_PORTED = "the same rule, as in LightCompress; there is no code by the authors"

_PER_TILE = "K / T per tile"
_UNCONFIRMED = "K / T per tile (ours; the published settings are not known)"
_FLOAT32 = "computed in float32 from the features on, where the published code keeps their dtype"
_MASKED = "chosen tokens are masked, so that none repeats"

PUBLISHED_FORMS: dict[str, PublishedForm] = {
    "cdpruner": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="CLIP relevance, sign -1",
        llava_next="K / T per tile, relevance normalised across all tiles",
        qwen2_5_vl="relevance to the mean input embedding of the question, sign +1 (ours)",
        ours=(
            "chosen tokens are masked and, beyond the rank of the kernel, the rest is chosen by "
            "relevance: the published loop produces NaN there and keeps fewer than K tokens",
            "constant relevance counts as 1 for every token instead of 0 / 0",
        ),
    ),
    "divprune": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published",
        llava_next="K / T per tile (ours); `tile_scope: global` is as published",
        qwen2_5_vl="on merged tokens (ours), or on encoder outputs, as others run it, with "
        "`rank_at: merger_in`",
        ours=("chosen tokens are masked: the published code may repeat one among duplicates",),
    ),
    "visionzip": PublishedForm(
        published="pre-projector merge",
        served="the same, K rows",
        llava="as published",
        llava_next="K / T per tile",
        qwen2_5_vl="mean attention over queries instead of [CLS]; `patch_only` alone (ours)",
        ours=(
            "`patch_only` (default) keeps one more patch instead of the [CLS] row, so that every "
            "row has an index; `patch_only: false` keeps the published rows",
            "rows without merged tokens are the model's projected tokens",
            "at budgets without a published split, 10 of 64 rows are contextual",
        ),
    ),
    "prumerge_plus": PublishedForm(
        published="pre-projector merge",
        served="the same, K rows: K - 1 tokens and the sum of the dropped ones",
        llava="as published",
        llava_next="K / T per tile",
        qwen2_5_vl="mean attention over queries instead of [CLS] (ours)",
        ours=(
            "K is given, while the published count depends on the image. Outliers come first, then "
            "evenly spaced tokens of the rest, where EffiVLM-Bench takes them from the top",
            "`drop_extra` keeps K tokens and no extra row; so does K = 1 per tile",
            "the paper reports a fine-tuned model; here nothing is trained",
        ),
    ),
    "trim": PublishedForm(
        published="pre-projector merge",
        served="the same, K rows: K - 1 patches and the mean of the others",
        llava="as published",
        llava_next="K / T per tile, each with its own mean (ours: the published code does not run)",
        qwen2_5_vl="as CDPruner there (ours)",
        ours=(
            "a text of several CLIP segments is represented by their mean: the published code "
            "truncates it at 77 tokens. The text is the instruction, without the chat template",
            "K = 1 per tile keeps a patch: the published code fails",
        ),
    ),
    "dart": PublishedForm(
        published="in-LLM pruning",
        served="pre-LLM selection by the states and keys of layer 1, or by input embeddings",
        llava="as the LightCompress port (the authors' repository contains no code)",
        llava_next=_GLOBAL,
        qwen2_5_vl=_PORTED,
        layers=2,
        ours=(
            _ONE_STAGE,
            "exactly K: 4 pivots, and (K - 4) / 8 tokens for each of 8 pivots, the remainder to "
            "the first ones; as published, 4 + 8 floor(K / 8)",
            _CONSECUTIVE,
            "pivots are processed in the order of a CPython set, as published, except that pivots "
            "with a hash collision come in order of position",
            "an instruction of fewer than four tokens uses its strongest token repeatedly",
        ),
    ),
    "fastv": PublishedForm(
        published="in-LLM pruning",
        served="pre-LLM selection by the attention of layer 1",
        llava="as published",
        llava_next=_GLOBAL,
        qwen2_5_vl=_PORTED,
        layers=1,
        ours=(
            _ONE_STAGE,
            _CONSECUTIVE,
        ),
    ),
    "pyramiddrop": PublishedForm(
        published="in-LLM pruning",
        served="pre-LLM selection by the attention of layer L / 4, the published first stage",
        llava="one stage of the published three",
        llava_next=_GLOBAL,
        qwen2_5_vl=_PORTED,
        layers=8,
        ours=(
            _ONE_STAGE,
            "one stage keeps K tokens; as published, half of the rest after layers 8, 16 and 24",
            "the default layer is a quarter of the depth, the first stage: at the last stage the "
            "scores alone cost three quarters of the prefill (see above)",
        ),
    ),
    "sparsevlm": PublishedForm(
        published="in-LLM pruning",
        served="pre-LLM selection by the raters' attention in layer 2",
        llava="one stage of the published three, first version",
        llava_next=_GLOBAL,
        qwen2_5_vl=_PORTED,
        layers=2,
        ours=(
            _ONE_STAGE,
            "one stage keeps K tokens; as published, fixed counts after layers 2, 6 and 15",
            "no recycling by default; `recycle` uses up to half of K for cluster rows: clusters of "
            "the layer's states, as published, but means of the rows that enter the model",
            "no noise on the density: of two equally dense tokens the lower index is the denser",
            "if no text token is above the mean, as with a single one, all of them are raters",
        ),
    ),
    "cen_divprune": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published",
        llava_next="K / T per tile, mean and weights of each tile",
        qwen2_5_vl="`scale_variance: true, weight: sigmoid` in a state with `rank_at: merger_in`, "
        "as published",
        ours=(
            "after the paper alone, which has no code. Its epsilons have no values: 1e-6 each",
            "the first token is DivPrune's on the centred distance, without the weight",
            "from a weighted distance of 1e-6 on, the rest comes by weight",
        ),
    ),
    "cen_cdpruner": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published; CDPruner's relevance, sign -1",
        llava_next="K / T per tile, relevance normalised across all tiles",
        qwen2_5_vl="as `cen_divprune`; relevance as CDPruner there (ours)",
        ours=(
            "after the paper alone, which has no code. Its epsilons have no values: 1e-6 each",
            "beyond the rank of the kernel the rest comes by weight, as in CDPruner",
            "`relevance: false` is the form that reads no question: a core by it is continued by "
            "relevance from the same residuals",
        ),
    ),
    "scope": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published",
        llava_next=_UNCONFIRMED,
        qwen2_5_vl="mean attention over queries; mean of the patches before the merger (ours; a "
        "port reads tokens after it)",
        ours=(
            _FLOAT32,
            _MASKED,
            "a zero row has the cosine 0, where the published code makes all scores NaN",
            "from a gain of 1e-9 on, the rest comes by attention",
        ),
    ),
    "mmtok": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published: words of the question but for the frequent ones, each alone",
        llava_next=_PER_TILE,
        qwen2_5_vl="`tau_text: 0.01`, as published; the words as on LLaVA (ours; published: the "
        "whole question)",
        ours=(
            _MASKED,
            "from a gain of 1e-12 on, the rest comes by index",
            "patches of padding are not excluded: images are cropped or stretched here, not padded",
            "`words: false` covers the image alone: a core by it is continued with the words",
        ),
    ),
    "prunesid": PublishedForm(
        published="pre-LLM selection",
        served="the same, K rows",
        llava="`mode: cls` is as published",
        llava_next="K / T per tile; the published code writes kept rows to wrong places",
        qwen2_5_vl="`mode: qwen`, the rule published for Qwen2-VL",
        ours=(
            "an exact decomposition, where the published one is randomised without a seed. It "
            "waits for the device on a GPU: the one step of any policy that does",
            "`mode: patch` (default) keeps one more patch instead of the [CLS] row, so that every "
            "row has an index; K = 1 per tile keeps a patch in any mode",
            "groups of more than 1000 tokens keep their order, which the published code breaks",
            "fewer than four tokens are one group; the count K is given, not found from the image",
        ),
    ),
    "holov": PublishedForm(
        published="pre-LLM selection",
        served="the same",
        llava="as published",
        llava_next="K / T per tile (ours; published: base view and map as one sequence)",
        qwen2_5_vl="mean attention over queries; bands as published there",
        ours=(
            "features are not read: the published variance term gives every band the same share "
            "of its attention, and quotas are unchanged by it",
            "a band of one token has the same factor as others: the published code misses 1000",
            "what a band has no room for goes to other bands: the published code adds zero rows",
        ),
    ),
    "fsr": PublishedForm(
        published="pre-LLM selection and merge",
        served="the same, K rows; in a core and in a delta, selection alone",
        llava="CDPruner's relevance, sign -1: the paper takes that signal and writes plus",
        llava_next="K / T per tile, relevance normalised across all tiles (ours)",
        qwen2_5_vl="`alpha: 0.0`: the paper leaves relevance out there",
        ours=(
            "after the paper's formulas: its repository is empty",
            "a focus of more than K tokens is cut at K, and nothing is scanned",
            "where all priorities are 0 the scan begins as DivPrune",
            "scan and merge read projected features; merged rows do not depend on the order",
            "`alpha: 0.0` reads no question: a core by it is continued by priority alone",
        ),
    ),
    "idpruner": PublishedForm(
        published="pre-LLM selection",
        served="the same rule with another importance",
        llava="attention of [CLS] in place of the trained importance (ours)",
        llava_next="K / T per tile; published: over all images of a request",
        qwen2_5_vl="mean attention over queries in place of the trained importance (ours)",
        ours=(
            "published importance is a trained network's; with attention or relevance its "
            "published accuracy does not carry over",
            "attention is the mean over heads; published code that adds 1e-6 to its range sums it",
            "`importance: relevance` reads the question, for a delta",
        ),
    ),
}
"""Every base policy by name."""
