"""Which form of each method was published, which form selects here, and what differs.

Knows nothing about how a method works: this is what a reader of results has to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["pre-LLM selection", "pre-projector merge", "in-LLM pruning"]


@dataclass(frozen=True, slots=True)
class Form:
    """One method: as published, and as its base policy.

    ``layers`` of the language model run over all N tokens before K are chosen, with the default
    parameters on a model of 32 layers. The three backbones say which recipe is followed there.
    """

    published: Kind
    served: str
    llava: str
    llava_next: str
    qwen2_5_vl: str
    ours: tuple[str, ...]
    layers: int = 0


_ONE_STAGE = (
    "selects once, before the model runs: every layer sees K tokens, where published the first "
    "ones see all N. Scores are over [start, image, instruction], not the whole chat template"
)
_PACKED = "positions are packed, as by all that prune before the model; published with gaps"
_GLOBAL = "over all tiles"
_LATER = "the same rule, as LightCompress carries it over; no code of the authors"

FORMS: dict[str, Form] = {
    "cdpruner": Form(
        published="pre-LLM selection",
        served="the same",
        llava="CLIP relevance, sign -1",
        llava_next="K / T a tile, relevance scaled over all tiles",
        qwen2_5_vl="relevance to the mean input embedding of the question, sign +1 (ours)",
        ours=(
            "chosen tokens are masked and, beyond the kernel's rank, the rest is taken by "
            "relevance: the published loop runs into NaN there and keeps fewer than K",
            "constant relevance counts as 1 for every token instead of 0 / 0",
        ),
    ),
    "divprune": Form(
        published="pre-LLM selection",
        served="the same",
        llava="as published",
        llava_next="K / T a tile (ours); `tile_scope: global` is as published",
        qwen2_5_vl="on merged tokens (ours; others run it on encoder outputs)",
        ours=("chosen tokens are masked: the published code may repeat one among duplicates",),
    ),
    "visionzip": Form(
        published="pre-projector merge",
        served="the same, K rows",
        llava="as published",
        llava_next="K / T a tile",
        qwen2_5_vl="mean attention over queries in place of [CLS]; `patch_only` alone (ours)",
        ours=(
            "`patch_only` (default) keeps one more patch in place of the [CLS] row, so that every "
            "row has an index; `patch_only: false` keeps the published rows",
            "rows that nothing was merged into are the model's own projected tokens",
            "the split at budgets that were not published: 10 of 64 rows are contextual",
        ),
    ),
    "prumerge_plus": Form(
        published="pre-projector merge",
        served="the same, K rows: K - 1 tokens and the row that sums what is dropped",
        llava="as published",
        llava_next="K / T a tile",
        qwen2_5_vl="mean attention over queries in place of [CLS] (ours)",
        ours=(
            "K is given: the published count follows the image. Outliers come first, then an even "
            "spread over the tokens not yet kept, where EffiVLM-Bench fills from the top",
            "`drop_extra` keeps K tokens and no further row; so does K = 1 of a tile",
            "the paper's figures are of a fine-tuned model; here nothing is trained",
        ),
    ),
    "trim": Form(
        published="pre-projector merge",
        served="the same, K rows: K - 1 patches and the mean of the others",
        llava="as published",
        llava_next="K / T a tile, each with its own mean (ours: the published code does not run)",
        qwen2_5_vl="as CDPruner there (ours)",
        ours=(
            "a text of several CLIP segments counts as their mean: the published code cuts it off "
            "at 77 tokens. The text is the instruction, without the chat template",
            "K = 1 of a tile keeps a patch: the published code fails",
        ),
    ),
    "dart": Form(
        published="in-LLM pruning",
        served="pre-LLM selection by the states and keys of layer 1, or by input embeddings",
        llava="as the LightCompress port (the authors' repository holds no code)",
        llava_next=_GLOBAL,
        qwen2_5_vl=_LATER,
        layers=2,
        ours=(
            _ONE_STAGE,
            "exactly K: 4 pivots, and (K - 4) / 8 tokens for each of 8 turns, the remainder to the "
            "first; published: 4 + 8 floor(K / 8)",
            _PACKED,
            "turns follow the order of CPython's set, as published, except that pivots that "
            "collide in its table come in order of position",
            "an instruction of fewer than four tokens gives its turns to its strongest token",
        ),
    ),
    "fastv": Form(
        published="in-LLM pruning",
        served="pre-LLM selection by the attention of layer 1",
        llava="as published",
        llava_next=_GLOBAL,
        qwen2_5_vl=_LATER,
        layers=1,
        ours=(
            _ONE_STAGE,
            _PACKED,
        ),
    ),
    "pyramiddrop": Form(
        published="in-LLM pruning",
        served="pre-LLM selection by the attention of layer L / 4, the published first stage",
        llava="one stage of the published three",
        llava_next=_GLOBAL,
        qwen2_5_vl=_LATER,
        layers=8,
        ours=(
            _ONE_STAGE,
            "one stage keeps K at once; published: half of what is left after layers 8, 16 and 24",
            "the default layer is a quarter of the depth, the first stage: at the last one the "
            "scores alone cost three quarters of the prefill (see above)",
        ),
    ),
    "sparsevlm": Form(
        published="in-LLM pruning",
        served="pre-LLM selection by the raters' attention in layer 2",
        llava="one stage of the published three, first version",
        llava_next=_GLOBAL,
        qwen2_5_vl=_LATER,
        layers=2,
        ours=(
            _ONE_STAGE,
            "one stage keeps K at once; published: fixed counts after layers 2, 6 and 15",
            "no recycling by default; `recycle` gives up to half of K to cluster rows, found in "
            "the layer's states as published, but made of what enters the model",
            "no noise on the density: of two tokens as dense, the lower index counts as denser",
            "where no text token is above the mean, as with a single one, all of them rate",
        ),
    ),
}
"""Every base policy by name."""
