"""Checks of a report, one function each: the empty string if it passes, else what is wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from vllm_autoprune.selftest.run import Completion, Report

BLOCK = 32
"""Tokens of one block of the prefix cache."""

TOLERANCE = 2e-2
"""Difference of log-probabilities in half precision that counts as equal."""

_HYBRID_TOLERANCE = 0.1
"""The same with linear attention, where a token alone and one of many are computed by different
kernels: 0.04 was measured."""


def choose_tolerance(report: Report) -> float:
    """Difference of log-probabilities that counts as equal for a report's model."""
    return _HYBRID_TOLERANCE if report.hybrid else TOLERANCE


def remaining_indices(stock: list[int], pruned: list[int], kept: list[list[int]]) -> list[int]:
    """Indices into the stock prompt of the tokens that remain."""
    (image,) = Counter(stock) - Counter(pruned)
    indices: list[int] = []
    at, rows = 0, iter(kept)
    while at < len(stock):
        if stock[at] != image:
            indices.append(at)
            at += 1
            continue
        indices += [at + row for row in next(rows)]
        while at < len(stock) and stock[at] == image:
            at += 1
    return indices


def count_between(prompt: list[int], image: int) -> list[int]:
    """How many image tokens stand before, between and after the other tokens of a prompt."""
    counts = [0]
    for token in prompt:
        if token == image:
            counts[-1] += 1
        else:
            counts.append(0)
    return counts


def describe_difference(
    completion: Completion, other: Completion, tolerance: float = TOLERANCE
) -> str:
    """The first difference between two completions, or the empty string."""
    if completion.prompt != other.prompt:
        return "another prompt"
    if completion.ids != other.ids:
        return f"another answer, {completion.ids} and {other.ids}"
    if not abs(completion.logprob - other.logprob) <= tolerance:  # NaN is not equal either
        return f"log-probabilities {completion.logprob} and {other.logprob}"
    return ""


def _first_change(
    completions: Mapping[str, Completion],
    expected: Mapping[str, Completion],
    tolerance: float = TOLERANCE,
) -> str:
    """The first completion that differs from the expected one, or whose positions do."""
    for name, completion in completions.items():
        wrong = describe_difference(completion, expected[name], tolerance)
        if wrong or completion.positions != expected[name].positions:
            return f"{name}: {wrong or f'positions {completion.positions}'}"
    return ""


def _first_difference(
    completions: Mapping[str, Completion], expected: Mapping[str, Completion], report: Report
) -> str:
    """The first completion that differs from the expected one of its question."""
    tolerance = choose_tolerance(report)
    for name, completion in completions.items():
        if wrong := describe_difference(completion, expected[name], tolerance):
            return f"{name}: {wrong}"
    return ""


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
    # "alone second" is compared with "second".
    expected = {name: report.split[name.split()[-1]] for name in report.split}
    return _first_difference(report.split, expected, report)


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


SMALL_BUDGET = 5
"""K of the pruned completions."""

_RUNNER_TOLERANCE = 0.2
"""Difference of log-probabilities that counts as equal between two model runners, whose kernels
round bfloat16 differently: 0.085 was measured on Qwen3-VL, and no difference in float32."""

_MERGER_TOLERANCE = 0.25
"""Error of tokens before the merger between bfloat16 and float32, in deviations between tokens:
tokens in another order are more than 1 apart."""


def answers_are_numbers(report: Report) -> str:
    """Log-probabilities are finite; if stock vLLM's are not, the other checks mean nothing."""
    for setting, completions in _settings(report).items():
        for name, completion in completions.items():
            if not math.isfinite(completion.logprob):
                whose = "stock vLLM's own" if setting == "stock" else "the"
                return f"{setting}, {name}: {whose} log-probability is {completion.logprob}"
    return ""


def whole_is_stock(report: Report) -> str:
    """K >= N: token ids, log-probabilities, positions and cache hits equal stock vLLM's exactly."""
    changed = (
        name for name, completion in report.whole.items() if completion != report.stock[name]
    )
    return next((f"{name}: differs from stock vLLM" for name in changed), "")


def prompts_shrink_as_predicted(report: Report) -> str:
    """K < N: only placeholders are removed, as many as computed from the image sizes."""
    for name, stock in report.stock.items():
        pruned = report.pruned[name].prompt
        removed = Counter(stock.prompt) - Counter(pruned)
        expected = sum(n - SMALL_BUDGET for n in report.predicted[name])
        if (
            len(removed) != 1
            or removed.total() != expected
            or len(stock.prompt) - len(pruned) != expected
        ):
            return f"{name}: {dict(removed)} were removed, not {expected} placeholders"
    return ""


def kept_rows_are_the_model_s_own(report: Report) -> str:
    """Each image keeps K of its rows unchanged and in order, deepstack levels included."""
    for name, images in report.kept.items():
        if len(images) != len(report.predicted[name]):
            return f"{name}: {len(images)} images were pruned"
        for rows, unpruned in zip(images, report.predicted[name], strict=True):
            inside = all(0 <= row < unpruned for row in rows)
            if len(rows) != SMALL_BUDGET or rows != sorted(set(rows)) or not inside:
                return f"{name}: rows {rows} of {unpruned}"
    return ""


def kept_rows_stand_in_their_tiles(report: Report) -> str:
    """Where text stands between tiles, each has placeholders for the rows kept of it."""
    for name, images in report.kept.items():
        stock, pruned = report.stock[name].prompt, report.pruned[name].prompt
        (image,) = Counter(stock) - Counter(pruned)
        sizes = report.predicted[name]
        rows = [sum(sizes[:i]) + row for i, own in enumerate(images) for row in own]
        start = 0
        for size, left in zip(
            count_between(stock, image), count_between(pruned, image), strict=True
        ):
            inside = sum(start <= row < start + size for row in rows)
            if inside != left:
                return f"{name}: {left} placeholders for {inside} of {size} tokens"
            start += size
    return ""


def small_steps_keep_the_same(report: Report) -> str:
    """Chunked prefill that splits images gives the same completions."""
    return _first_change(report.chunked, report.pruned, choose_tolerance(report))


def preempted_requests_go_on(report: Report) -> str:
    """Requests preempted during prefill or decoding, and recomputed, give the same completions."""
    return _first_change(report.preempted, report.pruned, choose_tolerance(report))


def the_same_question_shares(report: Report) -> str:
    """The prefix cache is used for repeated questions only, and does not change completions."""
    for name, again in report.again.items():
        first = report.pruned[name]
        if first.cached:
            return f"{name}: {first.cached} tokens of another question were used"
        if again.cached < BLOCK:
            return f"{name}: {again.cached} tokens were reused"
        if wrong := describe_difference(again, first, choose_tolerance(report)):
            return f"{name}: {wrong}"
    return ""


def questions_stand_alone(report: Report) -> str:
    """Questions about one image give the same completions as with empty caches."""
    return _first_difference(report.alone, report.pruned, report)


def names_do_not_matter(report: Report) -> str:
    """Images of several sizes with the same `uuid` give the same completions as without one."""
    return _first_difference(report.renamed, report.unnamed, report)


def images_are_seen_once(report: Report) -> str:
    """The vision tower runs once for each image."""
    return f"it ran {report.vision_runs} times more" if report.vision_runs else ""


def nothing_fell_back(report: Report) -> str:
    """No selection failed."""
    if report.fallbacks or report.errors:
        return f"{report.fallbacks} fallbacks, errors {report.errors}"
    return ""


def positions_are_a_gather(report: Report) -> str:
    """Kept and decoded tokens have the positions they have in the unpruned prompt (M-RoPE)."""
    for name, pruned in report.pruned.items():
        stock = report.stock[name]
        if len(stock.positions) == 1:
            continue
        indices = remaining_indices(stock.prompt, pruned.prompt, report.kept[name])
        indices += range(len(stock.prompt), len(stock.positions[0]))
        if pruned.positions != [[row[i] for i in indices] for row in stock.positions]:
            return f"{name}: {pruned.positions}"
    return ""


def merger_input_is_that_of_transformers(report: Report) -> str:
    """Tokens ranked before the patch merger are what enters it in transformers, in their order."""
    error = report.merger_error
    if error is None or error <= _MERGER_TOLERANCE:  # NaN is not below it
        return ""
    return f"an error of {error} of the deviation between tokens"


def videos_are_untouched(report: Report) -> str:
    """Completions about videos equal stock vLLM's, up to rounding with linear attention."""
    stock, pruned = report.video_stock, report.video_pruned
    if report.hybrid and stock is not None and pruned is not None:
        return describe_difference(pruned, stock, choose_tolerance(report))
    return "" if report.video_pruned == report.video_stock else "another answer about a video"


def embeddings_are_untouched(report: Report) -> str:
    """Completions about embeddings of images made elsewhere equal stock vLLM's."""
    stock, pruned = report.embeddings_stock, report.embeddings_pruned
    if stock is None or pruned is None:
        return "" if stock is pruned else "embeddings are not taken as by stock vLLM"
    return _first_change({"embeddings": pruned}, {"embeddings": stock}, choose_tolerance(report))


CHECKS: Mapping[str, Callable[[Report], str]] = {
    check.__name__: check
    for check in (
        answers_are_numbers,
        whole_is_stock,
        prompts_shrink_as_predicted,
        kept_rows_are_the_model_s_own,
        kept_rows_stand_in_their_tiles,
        small_steps_keep_the_same,
        preempted_requests_go_on,
        the_same_question_shares,
        questions_stand_alone,
        names_do_not_matter,
        images_are_seen_once,
        nothing_fell_back,
        positions_are_a_gather,
        questions_share_the_core,
        later_turns_recall_other_tokens,
        recalled_tokens_stand_in_their_image,
        parts_give_the_same_completions,
        parts_stand_on_one_grid,
        merger_input_is_that_of_transformers,
        videos_are_untouched,
        embeddings_are_untouched,
    )
}
"""Name -> check."""


def runners_agree(first: Report, second: Report) -> str:
    """Two model runners keep the same rows and give the same completions and positions.

    Not under a state with a core: of 40 tokens some are nearly as good as others, and the runners
    round features differently.
    """
    if first.kept != second.kept:
        return f"{first.runner} kept {first.kept}, {second.runner} {second.kept}"
    for setting, completions in _settings(first).items():
        if setting == "split":
            continue
        if wrong := _first_change(completions, _settings(second)[setting], _RUNNER_TOLERANCE):
            return f"{setting}, {wrong}"
    return ""


def _settings(report: Report) -> dict[str, dict[str, Completion]]:
    """Completions under each setting, stock first."""
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
        "split",
    )
    fields = dict(report)
    return {name: fields[name] for name in names}
