"""Checks of states with a core: of an image's two parts, and of what later turns recall."""

from __future__ import annotations

from collections import Counter

from vllm_autoprune.selftest.comparisons import (
    BLOCK,
    choose_tolerance,
    describe_difference,
    remaining_indices,
)
from vllm_autoprune.selftest.report import Report

SPLIT_QUESTION = "large"
"""Name of the question that is asked under a state with a core."""

SPLIT_BUDGET = 40
"""K of the completions under a state with a core, more than a block; less where N is."""

RECALL = 6
"""K_r of the later turns under a state with a core."""


def questions_share_the_core(report: Report) -> str:
    """A state with a core keeps two disjoint parts, and other questions reuse the core's blocks.

    With linear attention from the third question on: its state at the end of a core is kept once
    two prompts have parted there.
    """
    rows = [row for part in report.split_kept for row in part]
    budget = _split_budget(report)
    if len(report.split_kept) != 1 + report.splittable or len(set(rows)) != budget:
        return f"parts {report.split_kept}"
    cached = [report.split[name].cached for name in ("first", "second", "further")]
    shared = [0, report.splittable and not report.hybrid, report.splittable]
    if cached[0] or [count >= BLOCK for count in cached] != list(map(bool, shared)):
        return f"{cached} tokens were reused"
    return ""


def _split_budget(report: Report) -> int:
    return min(SPLIT_BUDGET, *(size - 1 for size in report.predicted[SPLIT_QUESTION]))


def later_turns_recall_other_tokens(report: Report) -> str:
    """Each later turn keeps more tokens of the image, and all before it stays in the cache.

    A request for that is refused where an image cannot be several items of a prompt.
    """
    if not report.splittable and not report.recall_refused:
        return "recall was not refused"
    kept = [row for part in report.split_kept for row in part]
    (size,) = report.predicted[SPLIT_QUESTION]
    left = size - _split_budget(report)
    wanted = [min(RECALL, left), min(RECALL, max(0, left - RECALL))] if report.splittable else []
    if [len(rows) for rows in report.recalled] != [count for count in wanted if count]:
        return f"recalled {report.recalled}, not {wanted}"
    rows = [row for part in report.recalled for row in part]
    if len({*kept, *rows}) != len(kept) + len(rows):
        return f"{report.recalled} after {report.split_kept}"
    if report.split["third"].cached < BLOCK:
        return f"{report.split['third'].cached} tokens were reused"
    return ""


def recalled_tokens_stand_in_their_image(report: Report) -> str:
    """Tokens that later turns recall have the positions they have in the image (M-RoPE)."""
    stock, third = report.stock[SPLIT_QUESTION], report.split["alone third"]
    if len(stock.positions) == 1:
        return ""
    (image,) = Counter(stock.prompt) - Counter(report.split["first"].prompt)
    places = [i for i, token in enumerate(third.prompt) if token == image]
    first = stock.prompt.index(image)
    rows = [row for part in (*report.split_kept, *report.recalled) for row in part]
    expected = [[axis[first + row] for row in rows] for axis in stock.positions]
    stood = [[axis[i] for i in places] for axis in third.positions]
    return "" if stood == expected else f"{stood}"


def parts_give_the_same_completions(report: Report) -> str:
    """Parts of an image give the same completions with empty caches, in small steps, preempted."""
    for name, one in report.split.items():
        other = report.split[name.split()[-1]]
        if wrong := describe_difference(one, other, choose_tolerance(report)):
            return f"{name}: {wrong}"
    return ""


def parts_stand_on_one_grid(report: Report) -> str:
    """Tokens of both parts have the positions they have in the unpruned prompt (M-RoPE)."""
    stock, first = report.stock[SPLIT_QUESTION], report.split["first"]
    if len(stock.positions) == 1:
        return ""
    rows = [row for part in report.split_kept for row in part]
    indices = remaining_indices(stock.prompt, first.prompt, [rows])
    indices += range(len(stock.prompt), len(stock.positions[0]))
    same = first.positions == [[row[i] for i in indices] for row in stock.positions]
    return "" if same else f"{first.positions}"
