"""Checks of a report, one function each, which returns what is wrong or an empty text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import accumulate

from vllm_autoprune.selftest.run import (
    BLOCK,
    RECALL,
    SMALL_BUDGET,
    SPLIT_BUDGET,
    SPLIT_QUESTION,
    Completion,
    Completions,
    Report,
    Rows,
)

_TOLERANCE = 2e-2
"""Difference of log-probabilities in half precision that counts as equal."""

_HYBRID_TOLERANCE = 0.1
"""Tolerance with linear attention, which computes a single token and one of many with different
kernels: 0.04 was measured."""

_RUNNER_TOLERANCE = 0.2
"""Tolerance between two model runners, whose kernels round bfloat16 differently: 0.085 was measured
on Qwen3-VL, and no difference in float32."""

_MERGER_TOLERANCE = 0.5
"""Error of tokens before the merger between bfloat16 and float32, in deviations between tokens:
0.37 on Gemma 4 where the CPU has products in bfloat16; in another order they are 1.8 apart."""

# ---- what checks compare ----


def _count_between(prompt: list[int], image: int) -> list[int]:
    """How many image tokens stand before, between and after the other tokens of a prompt."""
    counts = [0]
    for token in prompt:
        if token == image:
            counts[-1] += 1
        else:
            counts.append(0)
    return counts


def _difference(
    completion: Completion,
    expected: Completion,
    tolerance: float,
    positions: bool = False,
) -> str:
    """What differs first between two completions, or the empty string."""
    if completion.prompt != expected.prompt:
        return "another prompt"
    if completion.ids != expected.ids:
        return f"another answer, {completion.ids} and {expected.ids}"
    if (
        not abs(completion.logprob - expected.logprob) <= tolerance
    ):  # NaN is not equal either
        return f"log-probabilities {completion.logprob} and {expected.logprob}"
    if positions and completion.positions != expected.positions:
        return f"positions {completion.positions}"
    return ""


def _compare(
    completions: Completions,
    expected: Completions,
    report: Report,
    positions: bool = True,
) -> str:
    """The first completion that differs from the one of the same name in ``expected``, and how."""
    tolerance = _HYBRID_TOLERANCE if report.hybrid else _TOLERANCE
    for name, completion in completions.items():
        wrong = _difference(completion, expected[name], tolerance, positions)
        if wrong:
            return f"{name}: {wrong}"
    return ""


def _repeated(completions: Completions) -> Completions:
    """The completion that each one repeats, by its name: "alone second" repeats "second"."""
    return {name: completions[name.split()[-1]] for name in completions}


def _find_image_token(stock: Completion, pruned: Completion) -> int:
    """The token id that occurs less often in the pruned prompt; there must be only one."""
    (image,) = Counter(stock.prompt) - Counter(pruned.prompt)
    return image


def _count_marks(stock: Completion, image: int, sizes: list[int]) -> int:
    """Placeholders before and behind the tokens of each image, of rows that begin and end it."""
    return (stock.prompt.count(image) - sum(sizes)) // (2 * len(sizes))


def _gather(
    stock: Completion, pruned: Completion, rows_kept: Rows, sizes: list[int]
) -> Rows:
    """Stock positions of the tokens that a pruned prompt keeps, and of the text that follows them.

    ``sizes`` has N of each image; text may stand between an image's tokens.
    """
    image = _find_image_token(stock, pruned)
    indices: list[int] = []
    images = zip(rows_kept, sizes, strict=True)
    marks = _count_marks(stock, image, sizes)
    index = 0
    while index < len(stock.prompt):
        if stock.prompt[index] != image:
            indices.append(index)
            index += 1
            continue
        rows, size = next(images)
        tokens = list[int]()
        text = list[int]()
        indices += range(index, index + marks)
        index += marks
        while len(tokens) < size:
            part = tokens if stock.prompt[index] == image else text
            part.append(index)
            index += 1
        chosen = [tokens[row] for row in rows]
        indices += sorted(chosen + text) if text else chosen
        indices += range(index, index + marks)
        index += marks
    axes = _find_positions(stock)
    indices += range(len(stock.prompt), len(axes[0]))
    return [[axis[i] for i in indices] for axis in axes]


def _find_positions(completion: Completion) -> Rows:
    """Positions of all tokens if they stand one after the other, or as received on several axes."""
    if len(completion.positions) > 1:
        return completion.positions
    return [[*range(len(completion.prompt) + len(completion.ids) - 1)]]


def _flatten(parts: Rows) -> list[int]:
    return [row for part in parts for row in part]


def _split_budget(report: Report) -> int:
    return min(SPLIT_BUDGET, *(size - 1 for size in report.predicted[SPLIT_QUESTION]))


# ---- checks ----

CHECKS: dict[str, Callable[[Report], str]] = {}
"""Name -> check."""


def _check(function: Callable[[Report], str]) -> Callable[[Report], str]:
    CHECKS[function.__name__.removeprefix("_")] = function
    return function


@_check
def _answers_are_numbers(report: Report) -> str:
    """Log-probabilities are finite; if stock vLLM's are not, the other checks mean nothing."""
    for setting, completions in report.completions.items():
        for name, completion in completions.items():
            if not math.isfinite(completion.logprob):
                whose = "stock vLLM's own" if setting.startswith("stock") else "the"
                return f"{setting}, {name}: {whose} log-probability is {completion.logprob}"
    return ""


@_check
def _whole_is_stock(report: Report) -> str:
    """K >= N: token ids, log-probabilities, positions and cache hits equal stock vLLM's exactly."""
    completions = report["whole"].items()
    changed = (
        name for name, completion in completions if completion != report["stock"][name]
    )
    return next((f"{name}: differs from stock vLLM" for name in changed), "")


@_check
def _prompts_shrink_as_predicted(report: Report) -> str:
    """K < N: only placeholders are removed, as many as computed from the image sizes."""
    for name, stock in report["stock"].items():
        pruned = report["pruned"][name].prompt
        removed = Counter(stock.prompt) - Counter(pruned)
        expected = sum(n - SMALL_BUDGET for n in report.predicted[name])
        shorter = len(stock.prompt) - len(pruned)
        if len(removed) != 1 or not removed.total() == shorter == expected:
            return f"{name}: {dict(removed)} were removed, not {expected} placeholders"
    return ""


@_check
def _kept_rows_are_the_model_s_own(report: Report) -> str:
    """Each image keeps K of its rows unchanged and in order, deepstack levels included."""
    for name, images in report.kept.items():
        if len(images) != len(report.predicted[name]):
            return f"{name}: {len(images)} images were pruned"
        for rows, unpruned in zip(images, report.predicted[name], strict=True):
            inside = all(0 <= row < unpruned for row in rows)
            if len(rows) != SMALL_BUDGET or rows != sorted(set(rows)) or not inside:
                return f"{name}: rows {rows} of {unpruned}"
    return ""


@_check
def _kept_rows_stand_in_their_tiles(report: Report) -> str:
    """Where vLLM embeds text between tiles, each has placeholders for the rows kept of it."""
    for name, images in report.kept.items():
        stock = report["stock"][name]
        pruned = report["pruned"][name]
        image = _find_image_token(stock, pruned)
        if any(report.texts[name]):
            continue
        sizes = report.predicted[name]
        rows = [
            sum(sizes[:i]) + row
            for i, kept_rows in enumerate(images)
            for row in kept_rows
        ]
        tiles = _count_between(stock.prompt, image)
        placeholders = _count_between(pruned.prompt, image)
        start = 0
        for size, count in zip(tiles, placeholders, strict=True):
            inside = sum(start <= row < start + size for row in rows)
            if inside != count:
                return f"{name}: {count} placeholders for {inside} of {size} tokens"
            start += size
    return ""


@_check
def _text_stands_between_the_tokens_that_it_did(report: Report) -> str:
    """Text that the plugin embeds stands behind the kept tokens that it follows unpruned."""
    for name, texts in report.texts.items():
        stock = report["stock"][name]
        pruned = report["pruned"][name]
        image = _find_image_token(stock, pruned)
        # Tokens before each other id of the stock prompt; those within an image are known to be
        # its text.
        preceding = [*accumulate(_count_between(stock.prompt, image))][:-1]
        sizes = report.predicted[name]
        marks = _count_marks(stock, image, sizes)
        start = marks
        for size, rows, text in zip(sizes, report.kept[name], texts, strict=True):
            inside = [count - start for count in preceding if 0 < count - start < size]
            expected = list[int]()
            if text:
                expected = [sum(row < count for row in rows) for count in inside]
            # The image's text may have more, before its tokens and behind them.
            around = len(text) - len(expected)
            allowed = [
                [0] * i + expected + [len(rows)] * (around - i)
                for i in range(around + 1)
            ]
            if text not in allowed:
                return f"{name}: text after {text} tokens, not {expected}"
            start += size + 2 * marks
    return ""


@_check
def _small_steps_keep_the_same(report: Report) -> str:
    """Chunked prefill, which splits images, changes no completion."""
    return _compare(report["chunked"], report["pruned"], report)


@_check
def _preempted_requests_go_on(report: Report) -> str:
    """Requests that are preempted during prefill or decoding are completed as if they were not."""
    return _compare(report["preempted"], report["pruned"], report)


@_check
def _the_same_question_shares(report: Report) -> str:
    """The prefix cache is used for repeated questions only, and does not change completions."""
    for name, again in report["again"].items():
        if cached := report["pruned"][name].cached:
            return f"{name}: {cached} tokens of another question were used"
        if again.cached < BLOCK:
            return f"{name}: {again.cached} tokens were reused"
    return _compare(report["again"], report["pruned"], report, positions=False)


@_check
def _questions_stand_alone(report: Report) -> str:
    """Questions about one image are answered as with empty caches."""
    return _compare(report["alone"], report["pruned"], report, positions=False)


@_check
def _images_are_seen_once(report: Report) -> str:
    """The vision tower runs once for each image."""
    return f"it ran {report.vision_runs} times more" if report.vision_runs else ""


@_check
def _nothing_fell_back(report: Report) -> str:
    """No selection failed."""
    failed = report.fallbacks or report.errors
    return f"{report.fallbacks} fallbacks, errors {report.errors}" if failed else ""


@_check
def _positions_are_a_gather(report: Report) -> str:
    """Kept and decoded tokens have the positions that they have in the unpruned prompt.

    Models that cannot do this have them packed instead.
    """
    for name, pruned in report["pruned"].items():
        stock = report["stock"][name]
        expected = _find_positions(pruned)
        if report.placed:
            rows = report.kept[name]
            expected = _gather(stock, pruned, rows, report.predicted[name])
        if pruned.positions != [axis[pruned.cached :] for axis in expected]:
            return f"{name}: {pruned.positions}, not {expected}"
    return ""


@_check
def _questions_share_the_core(report: Report) -> str:
    """A state with a core keeps two disjoint parts, and other questions reuse the core's blocks.

    If layers are of several kinds, reuse begins with the third question: vLLM caches recurrent
    states and blocks of sliding windows at the end of a core only after two prompts have diverged
    there.
    """
    rows = set(_flatten(report.split_kept))
    if len(report.split_kept) != 1 + report.splittable or len(rows) != _split_budget(
        report
    ):
        return f"parts {report.split_kept}"
    cached = [report["split"][name].cached for name in ("first", "second", "further")]
    shared = [False, report.splittable and not report.mixed, report.splittable]
    if cached[0] or [count >= BLOCK for count in cached] != shared:
        return f"{cached} tokens were reused"
    return ""


@_check
def _later_turns_recall_other_tokens(report: Report) -> str:
    """Each later turn keeps more tokens of the image, and everything before it stays in the cache.

    Recall is refused if an image cannot be several items of a prompt.
    """
    if not report.splittable and not report.recall_refused:
        return "recall was not refused"
    (size,) = report.predicted[SPLIT_QUESTION]
    expected = list[int]()
    if report.splittable:
        unused = size - _split_budget(report)
        turns = [min(RECALL, unused), min(RECALL, max(0, unused - RECALL))]
        expected = [count for count in turns if count]
    if [len(rows) for rows in report.recalled] != expected:
        return f"recalled {report.recalled}, not {expected}"
    rows = _flatten([*report.split_kept, *report.recalled])
    if len(set(rows)) != len(rows):
        return f"{report.recalled} after {report.split_kept}"
    reused = report["split"]["third"].cached
    return f"{reused} tokens were reused" if reused < BLOCK else ""


@_check
def _recalled_tokens_stand_in_their_image(report: Report) -> str:
    """Tokens that later turns recall have the positions they have in the image."""
    stock = report["stock"][SPLIT_QUESTION]
    third = report["split"]["alone third"]
    if not report.placed or not report.recalled:
        return ""
    image = _find_image_token(stock, report["split"]["first"])
    indices = [i for i, token in enumerate(third.prompt) if token == image]
    start = stock.prompt.index(image)
    rows = _flatten([*report.split_kept, *report.recalled])
    expected = [[axis[start + row] for row in rows] for axis in _find_positions(stock)]
    positions = [[axis[i] for i in indices] for axis in third.positions]
    return "" if positions == expected else f"{positions}"


@_check
def _parts_give_the_same_completions(report: Report) -> str:
    """Parts of an image give the same completions with empty caches, in small steps, preempted."""
    split = report["split"]
    return _compare(split, _repeated(split), report, positions=False)


@_check
def _parts_stand_on_one_grid(report: Report) -> str:
    """Tokens of both parts have the positions they have in the unpruned prompt."""
    stock = report["stock"][SPLIT_QUESTION]
    split = report["split"]["first"]
    if not report.placed:
        return ""
    rows = [_flatten(report.split_kept)]
    expected = _gather(stock, split, rows, report.predicted[SPLIT_QUESTION])
    return "" if split.positions == expected else f"{split.positions}"


@_check
def _cells_are_left_out(report: Report) -> str:
    """Remaining cells of a page with blank margins have the positions of the whole page.

    This holds for all remaining cells or a few, with empty caches and with chunked prefill. The
    request is refused if the tower encodes whole images.
    """
    cells = report["cells"]
    if report.cells is None:
        return "" if [*cells] == ["stock"] else f"{[*cells]} of a refused request"
    stock = cells["stock"]
    fewer = cells["left"]
    removed = Counter(stock.prompt) - Counter(fewer.prompt)
    if (
        len(removed) != 1
        or removed.total() != len(stock.prompt) - len(fewer.prompt) < 1
    ):
        return f"{dict(removed)} were removed"
    (count,) = (stock.prompt.count(token) for token in removed)
    if fewer.positions != _gather(stock, fewer, [report.cells], [count]):
        return f"positions {fewer.positions} of the cells {report.cells}"
    return _compare(cells, _repeated(cells), report)


@_check
def _videos_keep_some_tokens(report: Report) -> str:
    """Of a video fewer tokens are kept, each the model's own, where they stand in the whole video.

    Also with empty caches and in small steps; refused where videos are served whole.
    """
    videos = report["videos"]
    stock = report["stock others"].get("video")
    if not videos or stock is None:
        return "" if not videos else f"{[*videos]} of a model without videos"
    few = videos["few"]
    rows = report.video[0]
    count = len(rows)
    # The video is the first run of one token of that length.
    start = 0
    while len({*few.prompt[start : start + count]}) > 1:
        start += 1
    behind = start + count
    removed = len(stock.prompt) - len(few.prompt)
    around = stock.prompt[:start] + stock.prompt[behind + removed :]
    if few.prompt[:start] + few.prompt[behind:] != around:
        return f"{few.prompt} is not {stock.prompt} but for a video of {count} tokens"
    if removed < 1 or rows != sorted({*rows}) or min(rows) < 0:
        return f"rows {report.video}"
    axes = _find_positions(stock)
    tokens = [
        *range(start),
        *(start + row for row in rows),
        *range(behind + removed, len(axes[0])),
    ]
    if not report.placed:  # a token that is gone leaves no gap
        tokens = [*range(len(tokens))]
    if few.positions != [[axis[token] for token in tokens] for axis in axes]:
        return f"positions {few.positions} of the rows {report.video}"
    return _compare(videos, _repeated(videos), report)


@_check
def _merger_input_is_that_of_transformers(report: Report) -> str:
    """Tokens ranked before the patch merger are what enters it in transformers, in their order."""
    error = report.merger_error
    if error is None or error <= _MERGER_TOLERANCE:  # NaN is not below it
        return ""
    return f"an error of {error} of the deviation between tokens"


@_check
def _videos_are_untouched(report: Report) -> str:
    """A video that keeps all tokens is answered as by stock vLLM.

    With chunked prefill too, except on models with linear attention, whose chunked result rounds
    differently.
    """
    stock = report["stock others"]
    pruned = report["others"]
    if stock.keys() != pruned.keys():
        return f"{[*pruned]} taken, by stock vLLM {[*stock]}"
    for name, completion in pruned.items():
        wrong = _difference(completion, stock[name], tolerance=0.0, positions=True)
        if wrong and (name == "video" or not report.hybrid):
            return f"{name}: {wrong}"
    return ""


def runners_agree(report: Report, other: Report) -> str:
    """Two model runners keep the same rows and give the same completions and positions.

    A state with a core is not compared: some of its 40 tokens are nearly equal in rank, and the
    runners round features differently. The same happens to any state in bfloat16, the only dtype of
    linear attention on a CPU, so such models compare only completions with all tokens.
    """
    if not report.hybrid and report.kept != other.kept:
        return f"{report.runner} kept {report.kept}, {other.runner} {other.kept}"
    for setting, completions in report.completions.items():
        if setting in ("split", "stock others", "others"):
            continue
        if report.hybrid and setting not in ("stock", "whole"):
            continue
        for name, completion in completions.items():
            wrong = _difference(
                completion, other[setting][name], _RUNNER_TOLERANCE, positions=True
            )
            if wrong:
                return f"{setting}, {name}: {wrong}"
    return ""
