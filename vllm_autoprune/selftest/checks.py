"""What must hold of a report, one function a promise: empty where it holds, else what is wrong.

Knows nothing about how a report came about.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from vllm_autoprune.selftest.report import Report, Said

FEW = 5
"""K of the pruned answers."""

BLOCK = 32
"""Tokens of one block of the prefix cache."""

_CLOSE = 2e-2
"""Log-probabilities of half-precision answers that count as the same."""

_CLOSE_RUNNERS = 0.2
"""Between two runners, whose kernels round bfloat16 differently: 0.085 was seen on Qwen3-VL, and no
difference in float32."""


def answers_are_numbers(report: Report) -> str:
    """Log-probabilities are finite; where stock vLLM's are not, the rest says nothing."""
    for way, said in _ways(report).items():
        for name, one in said.items():
            if not math.isfinite(one.logprob):
                whose = "stock vLLM's own" if way == "stock" else "the"
                return f"{way}, {name}: {whose} log-probability is {one.logprob}"
    return ""


def whole_is_stock(report: Report) -> str:
    """K >= N: token ids, log-probabilities, positions and cache hits, to the last bit."""
    return _first(report.whole, lambda name, said: said == report.stock[name], "is not stock's")


def prompts_shrink_as_predicted(report: Report) -> str:
    """K < N: placeholders go, nothing else does, and as many as image sizes foretell."""
    for name, stock in report.stock.items():
        pruned = report.pruned[name].prompt
        gone = Counter(stock.prompt) - Counter(pruned)
        wanted = sum(n - FEW for n in report.predicted[name])
        if len(gone) != 1 or gone.total() != wanted or len(stock.prompt) - len(pruned) != wanted:
            return f"{name}: {dict(gone)} went, not {wanted} placeholders"
    return ""


def kept_rows_are_the_model_s_own(report: Report) -> str:
    """K rows an image, whole and in the model's order: deepstack levels and positions included."""
    for name, images in report.kept.items():
        if len(images) != len(report.predicted[name]):
            return f"{name}: {len(images)} images were pruned"
        for rows, unpruned in zip(images, report.predicted[name], strict=True):
            inside = all(0 <= row < unpruned for row in rows)
            if len(rows) != FEW or rows != sorted(set(rows)) or not inside:
                return f"{name}: rows {rows} of {unpruned}"
    return ""


def small_steps_keep_the_same(report: Report) -> str:
    """Chunked prefill that cuts through images."""
    return _moved(report.chunked, report.pruned)


def preempted_requests_go_on(report: Report) -> str:
    """A request that is pushed back while it is prefilled or decoded, and computed anew."""
    return _moved(report.preempted, report.pruned)


def the_same_question_shares(report: Report) -> str:
    """The prefix cache is used for the same question only, and changes nothing."""
    for name, again in report.again.items():
        first = report.pruned[name]
        if first.cached:
            return f"{name}: {first.cached} tokens of another question were used"
        if again.cached < BLOCK:
            return f"{name}: {again.cached} tokens were reused"
        if wrong := unlike(again, first):
            return f"{name}: {wrong}"
    return ""


def questions_stand_alone(report: Report) -> str:
    """Questions on one image answer as they do with all caches empty."""
    return next(
        (
            f"{name}: {wrong}"
            for name, said in report.alone.items()
            if (wrong := unlike(said, report.pruned[name]))
        ),
        "",
    )


def names_do_not_matter(report: Report) -> str:
    """Images of several sizes under one `uuid` are answered as they are without one."""
    return next(
        (
            f"{name}: {wrong}"
            for name, said in report.renamed.items()
            if (wrong := unlike(said, report.unnamed[name]))
        ),
        "",
    )


def images_are_seen_once(report: Report) -> str:
    """The vision tower does not run for an image that it has seen."""
    return f"it ran {report.vision_runs} times more" if report.vision_runs else ""


def nothing_fell_back(report: Report) -> str:
    """No selection failed."""
    if report.fallbacks or report.errors:
        return f"{report.fallbacks} fallbacks, errors {report.errors}"
    return ""


def positions_are_a_gather(report: Report) -> str:
    """Every token that is left, and what is decoded, stands where it stood unpruned (M-RoPE)."""
    for name, pruned in report.pruned.items():
        stock = report.stock[name]
        if len(stock.positions) == 1:
            continue
        left = survivors(stock.prompt, pruned.prompt, report.kept[name])
        left += range(len(stock.prompt), len(stock.positions[0]))
        if pruned.positions != [[row[i] for i in left] for row in stock.positions]:
            return f"{name}: {pruned.positions}"
    return ""


def videos_are_untouched(report: Report) -> str:
    """An answer about a video is stock's."""
    return "" if report.video_pruned == report.video_stock else "another answer about a video"


CHECKS: Mapping[str, Callable[[Report], str]] = {
    check.__name__: check
    for check in (
        answers_are_numbers,
        whole_is_stock,
        prompts_shrink_as_predicted,
        kept_rows_are_the_model_s_own,
        small_steps_keep_the_same,
        preempted_requests_go_on,
        the_same_question_shares,
        questions_stand_alone,
        names_do_not_matter,
        images_are_seen_once,
        nothing_fell_back,
        positions_are_a_gather,
        videos_are_untouched,
    )
}
"""Every promise by name."""


def runners_agree(first: Report, second: Report) -> str:
    """Two model runners keep the same rows, and answer alike from the same positions."""
    if first.kept != second.kept:
        return f"{first.runner} kept {first.kept}, {second.runner} {second.kept}"
    for way, said in _ways(first).items():
        if wrong := _moved(said, _ways(second)[way], _CLOSE_RUNNERS):
            return f"{way}, {wrong}"
    return ""


def _ways(report: Report) -> dict[str, dict[str, Said]]:
    """Answers by each way of serving, stock first."""
    names = (
        "stock",
        "whole",
        "pruned",
        "again",
        "alone",
        "unnamed",
        "renamed",
        "chunked",
        "preempted",
    )
    fields = dict(report)
    return {name: fields[name] for name in names}


def survivors(stock: list[int], pruned: list[int], kept: list[list[int]]) -> list[int]:
    """Places in the stock prompt of the tokens that are left."""
    (image,) = Counter(stock) - Counter(pruned)
    left: list[int] = []
    at, rows = 0, iter(kept)
    while at < len(stock):
        if stock[at] != image:
            left.append(at)
            at += 1
            continue
        left += [at + row for row in next(rows)]
        while at < len(stock) and stock[at] == image:
            at += 1
    return left


def unlike(one: Said, other: Said, close: float = _CLOSE) -> str:
    """How two answers differ that should be the same; `close` is of their log-probabilities."""
    if one.prompt != other.prompt:
        return "another prompt"
    if one.ids != other.ids:
        return f"another answer, {one.ids} and {other.ids}"
    if not abs(one.logprob - other.logprob) <= close:  # nor where one is no number
        return f"log-probabilities {one.logprob} and {other.logprob}"
    return ""


def _moved(said: Mapping[str, Said], wanted: Mapping[str, Said], close: float = _CLOSE) -> str:
    """Another answer, or tokens at other positions."""
    for name, one in said.items():
        wrong = unlike(one, wanted[name], close)
        if wrong or one.positions != wanted[name].positions:
            return f"{name}: {wrong or f'positions {one.positions}'}"
    return ""


def _first(said: Mapping[str, Said], holds: Callable[[str, Said], bool], wrong: str) -> str:
    return next((f"{name}: {wrong}" for name, one in said.items() if not holds(name, one)), "")
