"""Short measurement of a running server: four kinds of request, one at a time, a few rounds.

A round asks a short text, a long text, a question about a new image, and another question about
that image. With c a request's tokens, TTFT at the client, and everything a median over rounds:

    p            = (TTFT(long) - TTFT(short)) / (c(long) - c(short))
    request      = TTFT(short) - p x c(short)
    outside      = TTFT - queue - prefill        time outside the engine, by /metrics
    front end    = outside(first question) - outside(short)
    decode image = outside(another question) - outside(short), at most the front end
    processor    = front end - decode image
    tower        = TTFT(first question) - front end - selection - request - p x c(first question)

Without ``/metrics`` the front end cannot be told from the tower, and counts as part of it.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from vllm_autoprune.advice.observation import Observation
from vllm_autoprune.advice.server_client import ServerClient, Timing, server_error
from vllm_autoprune.advice.server_metrics import Exposition

ROUNDS = 5
_QUESTION_WORDS = 16
_LONG_WORDS = 600
_WORDS = (
    "the a red blue green small large round square left right near far above below house tree "
    "car dog cat table chair lamp window door road river cloud bird boat sign clock cup plate "
    "is are was has shows holds stands lies sits moves which what where who how many much and "
    "or but not very more less first last next same other every some two three four five"
)


@dataclass(frozen=True, slots=True)
class Round:
    """The four requests of one round."""

    short: Timing
    long: Timing
    first: Timing
    another: Timing


def probe_server(
    client: ServerClient,
    size: tuple[int, int],
    rounds: int = ROUNDS,
    report: Callable[[str], None] = lambda line: None,
) -> Observation:
    """Measure a server with images of ``size`` pixels; raises :class:`ConfigError`."""
    client.select_model()
    notes = []
    before = client.read_metrics()
    if before is None:
        notes.append("The server has no /metrics: front end, selection and tower count as tower.")
    elif before.total("vllm:num_requests_running"):
        notes.append("The server was busy while it was probed: times contain waiting for others.")
    source = random.Random()  # another seed each time, so that no cache knows the images
    report("warm-up")
    _ask_round(client, size, source)
    warm = client.read_metrics()
    results = []
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        results.append(_ask_round(client, size, source))
    after = client.read_metrics()
    known = summarize(results, _selection_seconds(warm, after), client.url)
    counted = [_mean_tokens(warm, after, stage) for stage in ("before", "after")]
    tokens, kept = counted if counted[0] else (known.budget, None)
    if tokens == kept:
        kept = None  # a server without a state
    measured = (
        f"Measured with images of {size[0]} x {size[1]} pixels, medians of {rounds} rounds: first "
        f"question {1000 * median(one.first.ttft for one in results):.1f} ms, another question "
        f"{1000 * median(one.another.ttft for one in results):.1f} ms."
    )
    block = None if before is None else before.block_size()
    return known.model_copy(
        update={
            "tokens": tokens,
            "budget": kept,
            "block": block,
            "notes": (measured, *notes, *known.notes),
        }
    )


def summarize(rounds: Sequence[Round], selection: float | None, url: str) -> Observation:
    """Values of the model from the rounds; ``budget`` is what an image adds to a prompt.

    That may be a few tokens of the chat template more than the image itself takes.
    """
    short, long, first = (
        median(one.ttft for one in column)
        for column in (
            [one.short for one in rounds],
            [one.long for one in rounds],
            [one.first for one in rounds],
        )
    )
    length = median(one.short.prompt_tokens for one in rounds)
    more = median(one.long.prompt_tokens for one in rounds) - length
    visual = round(median(one.first.prompt_tokens - one.short.prompt_tokens for one in rounds))
    if visual < 1:
        fix = "serve a model that takes images"
        raise server_error(url, "an image adds no tokens to a prompt", fix)
    if more <= 0 or long <= short:
        what = f"a prompt of {more:g} more tokens takes no longer"
        fix = "probe an idle server, or give --prefill-ms-per-token"
        raise server_error(url, what, fix)
    per_token = (long - short) / more
    request = max(short - per_token * length, 0.0)
    front_end = _median_difference([(one.first, one.short) for one in rounds])
    decode_image = _median_difference([(one.another, one.short) for one in rounds])
    if front_end is not None and decode_image is not None:
        decode_image = min(decode_image, front_end)
        processor: float | None = front_end - decode_image
    else:
        decode_image = processor = None
    prompt = median(one.first.prompt_tokens for one in rounds)
    rest = first - (front_end or 0.0) - (selection or 0.0) - request - per_token * prompt
    gaps = [gap for one in rounds for answer in (one.short, one.first) for gap in answer.gaps]
    return Observation(
        budget=visual,
        tower=max(rest, 0.0),
        prefill=per_token,
        decode_image=decode_image,
        processor=processor,
        selection=selection,
        request=request,
        decode=median(gaps) if gaps else None,
        notes=()
        if rest > 0
        else ("The tower takes too little to be seen beside prefill; it counts as 0.",),
    )


def draw_image(size: tuple[int, int], source: random.Random) -> str:
    """A picture of coloured rectangles as a JPEG data URL; no two are the same."""
    from PIL import Image, ImageDraw

    width, height = size
    image = Image.new("RGB", size, _draw_colour(source))
    pen = ImageDraw.Draw(image)
    for _ in range(200):
        x, y = source.randrange(width), source.randrange(height)
        corner = (x + source.randint(1, width // 4 + 1), y + source.randint(1, height // 4 + 1))
        pen.rectangle(((x, y), corner), fill=_draw_colour(source))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _ask_round(client: ServerClient, size: tuple[int, int], source: random.Random) -> Round:
    image = draw_image(size, source)
    question = _draw_text(_QUESTION_WORDS, source)
    # A word may be more than one token.
    words = min(_LONG_WORDS, client.context // 3) if client.context else _LONG_WORDS
    short = client.ask(question)
    long = client.ask(_draw_text(words, source))
    first = client.ask(question, image)
    return Round(short, long, first, client.ask(_draw_text(_QUESTION_WORDS, source), image))


def _draw_text(count: int, source: random.Random) -> str:
    return " ".join(source.choices(_WORDS.split(), k=count))


def _draw_colour(source: random.Random) -> tuple[int, int, int]:
    return source.randrange(256), source.randrange(256), source.randrange(256)


def _median_difference(pairs: Sequence[tuple[Timing, Timing]]) -> float | None:
    values = [
        more.outside - less.outside
        for more, less in pairs
        if more.outside is not None and less.outside is not None
    ]
    return max(median(values), 0.0) if values else None


def _selection_seconds(before: Exposition | None, after: Exposition | None) -> float | None:
    """Mean seconds of the selections between two answers of ``/metrics``."""
    name = "autoprune_selection_seconds"
    count = _increase(before, after, f"{name}_count")
    return (_increase(before, after, f"{name}_sum") or 0.0) / count if count else None


def _mean_tokens(before: Exposition | None, after: Exposition | None, stage: str) -> int | None:
    """Visual tokens of an image before or after pruning, by a server with the plugin."""
    images = _increase(before, after, "autoprune_images_total")
    tokens = _increase(before, after, "autoprune_visual_tokens_total", f'stage="{stage}"')
    return round(tokens / images) if images and tokens else None


def _increase(
    before: Exposition | None, after: Exposition | None, name: str, label: str = ""
) -> float | None:
    end = after.total(name, label) if after is not None else None
    if end is None or before is None:
        return None
    return end - (before.total(name, label) or 0.0)
