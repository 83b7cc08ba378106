"""Write docs/base-policies.md from the registry of base policies.

Run ``python scripts/base_policies.py``.
"""

from __future__ import annotations

from pathlib import Path

from vllm_autoprune.base_policies.published_forms import PUBLISHED_FORMS, PublishedForm

import vllm_autoprune  # noqa: F401  (registers the base policies)
from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.cost import prefill_flops
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, INSTRUCTION_NEEDS, BasePolicy

LLAVA_7B = BACKBONE_SHAPES["llava-1.5-7b"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "base-policies.md"
BUDGETS = (64, 128)
STAGES = (8, 24)

HEAD = """\
# Base policies

Seventeen published methods; each gives exactly K rows before the language
model runs. Written by `python scripts/base_policies.py`; [What is supported](support.md) says which
backbone serves which.

`tests/golden` replays what the published code returned (`python -m tests.golden`). DART's is a
port, PruMerge+ at a given K EffiVLM-Bench's rule; Cen and FSR have no code, only formulas.

Greedy selections take the lowest index within 2^-21 of the best value (relative for gains of a DPP
and of coverage), so float32 rounding decides no tie. A DPP's first gain takes a token's cosine with
itself as 1.

*question*: whether it is read, *optional* by a parameter. {continuing} go on from tokens that are
kept, as in a [core](states.md#core-and-delta).
"""

COSTS = """\
## What reading the language model costs

Methods published as pruning inside the model run its first layers over all N tokens before prefill,
then K tokens through all. Estimated prefill FLOPs of LLaVA-1.5-7B, N = 576, in percent of the
unpruned prefill (image tokens alone, scores not counted):
"""

VERDICT = """\
PyramidDrop's published last stage, layer 24, costs three quarters of the prefill for the scores
alone, from K = 192 on more than no pruning; the default is its first. With `layer: 2` it is FastV
with `layer: 3`.
"""

NOTES = """\
## Policies

*LLaVA*: as published unless it says otherwise. *NeXT*: LLaVA-NeXT, *per tile* with K / T tokens for
each of T tiles. *Qwen*: Qwen2.5-VL; *mean attention* is over queries, in place of [CLS]. *Ours*:
where no source decides, or K rows need another rule. DART, FastV, PyramidDrop and SparseVLM select
once, before prefill (as published, the first layers see all N tokens), and score [start, image,
instruction], not the chat template.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            HEAD.replace("{continuing}", _continuing()),
            _forms(),
            COSTS,
            _costs(),
            VERDICT,
            _policies(),
        ]
    )


def _forms() -> str:
    rows = [
        [
            f"`{name}`",
            _form(PUBLISHED_FORMS[name]),
            ", ".join(f"`{need}`" for need in sorted(policy.needs)) or "-",
            _question(policy),
        ]
        for name, policy in sorted(BASE_POLICIES.items())
    ]
    head = ["name", "published as; here", "reads", "question"]
    return _table(head, rows)


def _continuing() -> str:
    return ", ".join(f"`{name}`" for name, it in sorted(BASE_POLICIES.items()) if it.continuation)


def _form(form: PublishedForm) -> str:
    return form.published + ("" if form.served == "the same" else f"; {form.served}")


def _question(policy: BasePolicy) -> str:
    if policy.needs.isdisjoint(INSTRUCTION_NEEDS):
        return "-"
    return "yes" if policy.core is None else "optional"


def _costs() -> str:
    whole = prefill_flops(LLAVA_7B, (LLAVA_7B.tokens,) * LLAVA_7B.layers)

    def percent(layers: int, budget: int) -> str:
        scoring = prefill_flops(LLAVA_7B, (LLAVA_7B.tokens,) * layers)
        pruned = prefill_flops(LLAVA_7B, (budget,) * LLAVA_7B.layers)
        return f"{100 * (scoring + pruned) / whole:.0f}"

    named = {name: form.layers for name, form in sorted(PUBLISHED_FORMS.items()) if form.layers}
    rows = [["none (CDPruner, DivPrune, ...)", "0", *(percent(0, k) for k in BUDGETS)]]
    rows += [[f"`{name}`", str(n), *(percent(n, k) for k in BUDGETS)] for name, n in named.items()]
    rows += [
        [f"`pyramiddrop`, `layer: {n}`", str(n), *(percent(n, k) for k in BUDGETS)]
        for n in STAGES
        if n != named["pyramiddrop"]
    ]
    return _table(["policy", "layers", *(f"K = {k}" for k in BUDGETS)], rows)


def _policies() -> str:
    parts = [NOTES]
    for name, form in sorted(PUBLISHED_FORMS.items()):
        notes = " ".join(f"{note[0].upper()}{note[1:]}." for note in form.ours)
        llava = "" if form.llava == "as published" else f"*LLaVA:* {form.llava}. "
        parts.append(
            f"**{name}**: {BASE_POLICIES[name].doc} {llava}*NeXT:* {form.llava_next}. "
            f"*Qwen:* {form.qwen2_5_vl}. *Ours:* {notes}\n"
        )
    return "\n".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
