"""The times of a running server, by a short measurement.

The probe sends four kinds of request, one at a time, ten rounds: a short text, a long text, a
question about a new image, and another question about that image. With c a request's tokens, TTFT
at the client, and everything a median over rounds:

    p            = (TTFT(long) - TTFT(short)) / (c(long) - c(short))
    request      = TTFT(short) - p x c(short)
    outside      = TTFT - queue - prefill        time outside the engine, by /metrics
    front end    = outside(first question) - outside(short)
    decode image = outside(another question) - outside(short), at most the front end
    processor    = front end - decode image
    tower        = TTFT(first question) - front end - selection - request - p x c(first question)

Without ``/metrics`` the front end cannot be told from the tower, and counts as part of it. What
``/metrics`` say counts only where no other client's request came between.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from vllm_autoprune.advise import Inputs
from vllm_autoprune.http_client import CHAT, Metrics, ServerClient, describe_rejection
from vllm_autoprune.statistics import resample
from vllm_autoprune.stream import EMPTY, parse_stream

_ANSWER_TOKENS = 8
_QUESTION_WORDS = 16
_LONG_WORDS = 600
_DRAWS = 1000
_WORDS = (
    "the a red blue green small large round square left right near far above below house tree "
    "car dog cat table chair lamp window door road river cloud bird boat sign clock cup plate "
    "is are was has shows holds stands lies sits moves which what where who how many much and "
    "or but not very more less first last next same other every some two three four five"
)


class _Answer(NamedTuple):
    """One streamed answer, with its times in seconds, and the engine's counters."""

    ttft: float
    gaps: tuple[float, ...]
    """Seconds between chunks with text."""
    prompt_tokens: int
    gained: Metrics | None
    """Growth of ``/metrics`` by this request alone; None if it is not known."""
    thinks: bool = False
    """Whether it begins with thoughts."""

    @property
    def outside(self) -> float | None:
        """TTFT minus the engine's queue and prefill times."""
        if self.gained is None:
            return None
        stages = (
            self.gained.total(f"vllm:request_{stage}_time_seconds_sum") or 0.0
            for stage in ("queue", "prefill")
        )
        return max(self.ttft - sum(stages), 0.0)


class _Round(NamedTuple):
    """One answer to each kind of request."""

    short: _Answer
    long: _Answer
    question: _Answer
    """Answer to a question about a new image."""
    another: _Answer
    """Answer to another question about that image."""

    @property
    def image_outside(self) -> tuple[float, float] | None:
        """Seconds that a new image and an already processed one add to the time outside the engine.

        None if this time is not known for one of the requests.
        """
        outside = [answer.outside for answer in self if answer.outside is not None]
        if len(outside) < len(self):
            return None
        short, _, question, another = outside
        return question - short, another - short


def probe_server(
    client: ServerClient,
    size: tuple[int, int],
    inputs: Inputs,
    model: str | None = None,
    report: Callable[[str], None] = lambda line: None,
    rounds: int = 10,
) -> None:
    """Measure a server with images of ``size`` pixels; raises :class:`ConfigError`."""
    with client.reporting_failures():
        models = client.list_models()
        name = client.choose_model(models, model)
        metrics = client.read_metrics()
        # Another seed at each probe, so that no cache knows the images.
        rng = random.Random()
        report("warm-up")
        _ask_round(client, name, models[name], size, rng)
        results = list[_Round]()
        for number in range(rounds):
            report(f"round {number + 1} of {rounds}")
            results.append(_ask_round(client, name, models[name], size, rng))
    inputs.fill(
        f"Measured with images of {size[0]} x {size[1]} pixels, medians of {rounds} rounds (all "
        f"between): first question {_format_ttft([row.question for row in results])}, another "
        f"question {_format_ttft([row.another for row in results])}.",
        block=None if metrics is None else _read_block(metrics),
    )
    answers = list(itertools.chain(*results))
    inputs.fill(*_list_reservations(metrics, answers))
    times = _solve_rounds(results)
    if times["tokens"] < 1:
        fix = "serve a model that takes images"
        raise client.error("an image adds no tokens to a prompt", fix)
    if times["prefill"] <= 0:
        what = "a longer prompt takes no longer"
        fix = "probe an idle server"
        raise client.error(what, f"{fix}, or give --prefill-ms-per-token")
    if times["tower"] <= 0:
        inputs.fill(
            "The tower takes too little to be seen beside prefill; it counts as 0."
        )
    _fill_visual_tokens(inputs, answers)
    # Values from flags are the same in every resample.
    unknown = times.keys() - inputs.values.keys() - {"tokens"}
    for row in resample(rounds, _DRAWS):
        drawn = _solve_rounds([results[index] for index in row])
        inputs.repeats.append({name: drawn.get(name, 0.0) for name in unknown})
    inputs.fill(**times)


def _format_ttft(answers: Sequence[_Answer]) -> str:
    """Median and range of the times to first token."""
    times = [1000 * answer.ttft for answer in answers]
    return f"{median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})"


def _read_block(metrics: Metrics) -> int | None:
    """Tokens of a KV block; 0 without a prefix cache, None where the server does not say."""
    config = "vllm:cache_config_info"
    if metrics.label(config, "enable_prefix_caching") == "False":
        return 0
    digits = metrics.label(config, "block_size") or ""
    return int(digits) if digits.isdigit() else None


def _list_reservations(
    metrics: Metrics | None, answers: Sequence[_Answer]
) -> Iterator[str]:
    """Notes on what makes the times inexact."""
    if any(answer.thinks for answer in answers):
        yield "The model thinks before it answers: its first token is one of its thoughts."
    if metrics is None:
        yield "The server has no /metrics: front end, selection and tower count as tower."
    elif metrics.total("vllm:num_requests_running") or not all(
        answer.gained for answer in answers
    ):
        yield "The server was busy while it was probed: times contain waiting for others."


def _fill_visual_tokens(inputs: Inputs, answers: Sequence[_Answer]) -> None:
    """Fill in the mean visual tokens of an image before pruning and after it, by ``/metrics``."""
    images = _sum_gained(answers, "autoprune_images_total") or 1
    total = "autoprune_visual_tokens_total"
    unpruned = round(_sum_gained(answers, total, stage="before") / images)
    pruned = round(_sum_gained(answers, total, stage="after") / images)
    if not unpruned and "tokens" not in inputs.values:
        inputs.fill(
            "N is what an image adds to a prompt, a few tokens of its template included."
        )
    # A server without a state keeps all tokens, which is no budget.
    inputs.fill(
        tokens=unpruned or None, budget=pruned if 0 < pruned < unpruned else None
    )


def _sum_gained(answers: Iterable[_Answer], name: str, **labels: str) -> float:
    """Growth of a metric, summed over the requests for which it is known."""
    gains = (answer.gained for answer in answers if answer.gained is not None)
    return math.fsum(gained.total(name, **labels) or 0.0 for gained in gains)


def _solve_rounds(rounds: Sequence[_Round]) -> dict[str, float]:
    """Seconds of each part by the medians of some rounds, and the ``tokens`` of an image.

    These are what an image adds to a prompt, which may be a few tokens of the chat template more
    than the image itself takes. ``prefill`` of 0 or less: a longer prompt took no longer.
    """
    kinds: list[tuple[_Answer, ...]] = list(zip(*rounds, strict=True))
    short, long, question, _ = (
        median(answer.ttft for answer in answers) for answers in kinds
    )
    short_tokens, long_tokens, question_tokens, _ = (
        median(answer.prompt_tokens for answer in answers) for answers in kinds
    )
    # Prompts without an image: a longer prompt adds prefill; every request takes the rest.
    prefill = 0.0
    if long_tokens > short_tokens:
        prefill = (long - short) / (long_tokens - short_tokens)
    request = max(short - prefill * short_tokens, 0.0)
    times = {
        "tokens": round(question_tokens - short_tokens),
        "prefill": prefill,
        "request": request,
    }
    front_end = 0.0
    outside = [answers.image_outside for answers in rounds]
    added = [seconds for seconds in outside if seconds is not None]
    if added:
        front_end = max(median(new for new, _ in added), 0.0)
        # The server keeps what its processor made of an image, but decodes each image again.
        decode_image = max(median(processed for _, processed in added), 0.0)
        times["decode_image"] = min(decode_image, front_end)
        times["processor"] = front_end - times["decode_image"]
    answers = list(itertools.chain(*rounds))
    selection = 0.0
    selections = _sum_gained(answers, "autoprune_selection_seconds_count")
    if selections:
        selection = _sum_gained(answers, "autoprune_selection_seconds_sum") / selections
        times["selection"] = selection
    tower = question - front_end - selection - request - prefill * question_tokens
    times["tower"] = max(tower, 0.0)
    gaps = list[float]()
    for answers_of_round in rounds:
        gaps += answers_of_round.short.gaps + answers_of_round.question.gaps
    if gaps:
        times["decode"] = median(gaps)
    return times


def _time_answer(
    client: ServerClient, model: str, question: str, *images: dict[str, object]
) -> _Answer:
    """Ask a question about the images, and time the streamed answer."""
    text = {"type": "text", "text": question}
    body = {
        "model": model,
        "messages": [{"role": "user", "content": [*images, text]}],
        "temperature": 0,
        "max_tokens": _ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    metrics = client.read_metrics()
    reads = list[tuple[float, bytes]]()
    start = time.perf_counter()
    with client.http.stream("POST", client.url + CHAT, json=body) as response:
        if not response.is_success:
            response.read()
            what = "a chat request"
            fix = "look into the log of the server"
            if images:
                what = "a request with an image"
                fix = "serve a model that takes images, and allow one of this size"
            what = f"refuses {what}: {describe_rejection(response)}"
            raise client.error(what, fix)
        for piece in response.iter_bytes():
            reads.append((time.perf_counter() - start, piece))
    stream = parse_stream(reads)
    # EMPTY is no failure here: the only token may be the end of the answer, which has no text. Then
    # the last read stands for its arrival.
    if stream.error not in (None, EMPTY) or not stream.prompt_tokens:
        what = f"a streamed answer cannot be timed: {stream.error or 'it has no usage'}"
        raise client.error(what, "give a vllm serve, or look into its log")
    ttft = stream.deltas[0] if stream.deltas else reads[-1][0]
    after = client.read_metrics()
    gained = None
    if after is not None and metrics is not None:
        gained = after.since(metrics)
        if gained.total("vllm:request_prefill_time_seconds_count") != 1:
            gained = None  # another client's request came between
    gaps = tuple(late - early for early, late in itertools.pairwise(stream.deltas))
    thinks = stream.thoughts > 0
    return _Answer(ttft, gaps, stream.prompt_tokens, gained, thinks)


def _ask_round(
    client: ServerClient,
    model: str,
    context: int,
    size: tuple[int, int],
    rng: random.Random,
) -> _Round:
    """Ask a short and a long question without an image, then two about one new image.

    ``context`` is the longest prompt and answer that the server takes, 0 where it does not say.
    """
    from PIL import Image

    # Coarse noise: no two images are the same, and they decode as photographs do.
    small = Image.frombytes("RGB", (40, 30), rng.randbytes(40 * 30 * 3))
    buffer = io.BytesIO()
    small.resize(size, Image.Resampling.BICUBIC).save(buffer, format="JPEG", quality=90)
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    image: dict[str, object] = {"type": "image_url", "image_url": {"url": url}}

    ask = partial(_time_answer, client, model)

    def draw(words: int) -> str:
        return " ".join(rng.choices(_WORDS.split(), k=words))

    # A word may be more than one token.
    long_words = min(_LONG_WORDS, context // 3) if context else _LONG_WORDS
    # The same question without and with the image, so that their prompts differ only by its tokens.
    question = draw(_QUESTION_WORDS)
    return _Round(
        short=ask(question),
        long=ask(draw(long_words)),
        question=ask(question, image),
        another=ask(draw(_QUESTION_WORDS), image),
    )
