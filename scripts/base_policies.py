"""Write docs/base-policies.md from the registry of base policies.

Run ``python scripts/base_policies.py``.
"""

from __future__ import annotations

from pathlib import Path

import vllm_autoprune  # noqa: F401  (registers the base policies)
from vllm_autoprune.backbones import LLAVA_7B
from vllm_autoprune.base_policies.published_forms import PUBLISHED_FORMS
from vllm_autoprune.cost import prefill_flops
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, INSTRUCTION_NEEDS, BasePolicy

PAGE = Path(__file__).resolve().parents[1] / "docs" / "base-policies.md"
BUDGETS = (32, 64, 128, 192)
STAGES = (2, 8, 16, 24)

HEAD = """\
# Base policies

Seventeen published methods behind one interface. Each gives exactly K rows before the language
model runs. Written by `python scripts/base_policies.py`; which backbones can serve which policy
is in [What is supported](support.md) (*inside the tower*).

`tests/golden` replays what the methods' published code returned on synthetic inputs
(`python -m tests.golden`). DART's is a port; PruMerge+ at a given K is EffiVLM-Bench's rule; the
two Cen policies and FSR have no code, and theirs is what the papers' formulas give in float64.

Greedy selections (DPP, farthest point, coverage, marginal relevance) count values within 2^-21
(5e-7) of the best one as equal to it, and the lowest index wins: relative to the best for gains of
a DPP and of coverage, and as they are for distances and relevance. So the rounding of float32
decides no tie. In all golden cases the two best tokens of a step are further apart (1.1e-6) or
bit-identical. A DPP's first gain takes the cosine of a token with itself as 1, whatever its
rounding (up to 9e-3 in bfloat16); later gains are those of the published code in the dtype of the
features.

Columns: *question*, whether the policy reads it, *optional* where parameters decide; *continues*,
whether it goes on from tokens that are kept already, as in a state with a
[core](states.md#core-and-delta), rather than keep its own first picks beside them.
"""

COSTS = """\
## What reading the language model costs

Methods that were published as pruning inside the model need its first layers to score. Here these
layers run over all N tokens before prefill, then K tokens go through all layers. What is removed
never enters the KV cache, but the layers that score are paid on top. Estimated prefill FLOPs of
LLaVA-1.5-7B with N = 576 image tokens, in percent of the unpruned prefill
(`vllm_autoprune.cost`; image tokens alone, the scores themselves not counted):
"""

VERDICT = """\
PyramidDrop's published last stage ranks at layer 24. Before the model that is three quarters of
the prefill for the scores alone, and from K = 192 on more than no pruning at all. The default is
its first stage, a quarter of the depth. With `layer: 2` it is cheaper still, and the same as
FastV with `layer: 3`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, _forms(), _recipes(), COSTS, _costs(), VERDICT, _deviations()])


def _forms() -> str:
    rows = [
        [
            f"`{name}`",
            PUBLISHED_FORMS[name].published,
            PUBLISHED_FORMS[name].served,
            ", ".join(f"`{need}`" for need in sorted(policy.needs)) or "-",
            _question(policy),
            "yes" if policy.continuation else "-",
            str(PUBLISHED_FORMS[name].layers or "-"),
        ]
        for name, policy in sorted(BASE_POLICIES.items())
    ]
    head = ["name", "published as", "here", "reads beyond features", "question", "continues"]
    return _table([*head, "layers run to score"], rows)


def _question(policy: BasePolicy) -> str:
    if policy.needs.isdisjoint(INSTRUCTION_NEEDS):
        return "-"
    return "yes" if policy.core is None else "optional"


def _recipes() -> str:
    rows = [
        [f"`{name}`", form.llava, form.llava_next, form.qwen2_5_vl]
        for name, form in sorted(PUBLISHED_FORMS.items())
    ]
    title = "## Recipe by backbone\n\n"
    return title + _table(["name", "`llava`", "`llava_next`", "`qwen2_5_vl`"], rows)


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
    return _table(["policy", "layers to score", *(f"K = {k}" for k in BUDGETS)], rows)


def _deviations() -> str:
    parts = ["## What is ours\n\nWhere no source decides, or exactly K rows need another rule.\n"]
    for name, form in sorted(PUBLISHED_FORMS.items()):
        notes = "\n".join(f"- {note[0].upper()}{note[1:]}." for note in form.ours)
        parts.append(f"### {name}\n\n{BASE_POLICIES[name].doc}\n\n{notes}\n")
    return "\n".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
