"""One arm, served and asked one request at a time: prefill, decode, memory, score.

Knows nothing about formulas.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.efficiency.models import Model
from benchmarks.load.arms import Arm
from benchmarks.load.client import EMPTY, Client
from benchmarks.load.errors import LoadError
from benchmarks.load.plain import Plain
from benchmarks.load.prepared import Line, Prepared, body, prepare
from benchmarks.load.record import Record
from benchmarks.load.server_metrics import Watch
from benchmarks.load.workload import Workload
from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from benchmarks.minillava.split import held_out, png, scores
from benchmarks.overhead.measure import stages
from benchmarks.overhead.resident import resident_of_group
from benchmarks.server import Server, ServerDied, serve

SERVED = "served"
OUTPUT_TOKENS = 16
AT_ONCE = 8


class Pass(Plain):
    """One pass over one arm; seconds, bytes."""

    ttft: tuple[float, ...]
    """At the client: with HTTP, the image processor and the vision tower."""
    again: tuple[float, ...] = ()
    """The same of another question on the same image, asked right after the first."""
    prefill: float
    """In the engine, mean: vLLM's own ``request_prefill_time_seconds``, vision tower included."""
    decode: tuple[float, ...]
    """A token after the first, of each request."""
    prompt_tokens: float
    visual_tokens: float | None
    """Kept of one image, as the plugin counts them; None where there is no plugin."""
    resident: int
    """The most resident bytes of all the server's processes, looked at after each request."""
    score: tuple[float, float] | None = None
    """Accuracy and accuracy+, per cent."""


class Refused(Plain):
    """An arm that this installation does not serve."""

    reason: str


def requests(model: Model, number: int, out: Path) -> Prepared:
    """The same requests for every arm: one image of the published size, another each time."""
    return prepare(
        Workload(
            model=SERVED,
            requests=number,
            warm_up=2,
            output_tokens=OUTPUT_TOKENS,
            sides=((model.side, 1.0),),
            aspects=(("1/1", 1.0),),
            words=((16, 1.0),),
            vocabulary="english" if model.scored else "numbered",
        ),
        out / f"requests-{model.name}",
    )


def measure(arm: Arm, model: Model, asked: Prepared, scenes: int, log: Path) -> Pass | Refused:
    """Serve and ask; a server that does not start is an arm that cannot be had, not an end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with serve(
            arm.model, *arm.flags, env=dict(arm.environment), log=log, patience=900
        ) as server:
            return _ask(server, model, asked, scenes)
    except ServerDied as error:
        return Refused(reason=_cause(str(error)))


def _ask(server: Server, model: Model, asked: Prepared, scenes: int) -> Pass:
    client = Client(server.url, patience=900)
    for line in asked.warm_up:
        client.send(asked.body(line))
    watch = Watch(server.url)
    watch.look()
    records, again = list[Record](), list[Record]()
    prefill, resident = 0.0, 0
    for line in asked.measured:
        before = stages(server.get("/metrics"))["prefill"]
        records.append(client.send(asked.body(line), index=line.ask.index))
        prefill += stages(server.get("/metrics"))["prefill"] - before
        resident = max(resident, sum(resident_of_group(server.process.pid).values()))
        again.append(client.send(_another(asked, line), index=line.ask.index))
    watch.look()
    metrics = watch.metrics()
    _all_answered([*records, *again])
    kept, images = metrics.visual_tokens_after, metrics.images
    return Pass(
        ttft=tuple(record.ttft for record in records),
        again=tuple(record.ttft for record in again),
        prefill=prefill / len(records),
        decode=tuple(tpot for record in records if (tpot := record.tpot) is not None),
        prompt_tokens=sum(r.prompt_tokens or 0 for r in records) / len(records),
        visual_tokens=kept / images if kept and images else None,
        resident=resident,
        score=score(client, scenes) if model.scored and scenes else None,
    )


def _another(asked: Prepared, line: Line) -> bytes:
    """Another question of as many words about the same image: the same words backwards."""
    backwards = " ".join(reversed(line.ask.question.split()))
    return body(asked.workload, line.ask.model_copy(update={"question": backwards}))


def score(client: Client, scenes: int) -> tuple[float, float]:
    """Accuracy and accuracy+ over mini-LLaVA's held-out questions."""
    examples = held_out("test", scenes)
    bodies: list[bytes] = []
    for example in examples:
        url = "data:image/png;base64," + base64.b64encode(png(example.image)).decode()
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": example.question},
        ]
        asked = {
            "model": SERVED,
            "messages": [{"role": "user", "content": parts}],
            "temperature": 0,
            "max_tokens": MAX_ANSWER_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        bodies.append(json.dumps(asked).encode())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        records = list(pool.map(client.send, bodies))
    # To say nothing is a wrong answer, not a missing one.
    _all_answered([record for record in records if record.error != EMPTY])
    found = scores(examples, [record.text for record in records])
    return 100 * found.accuracy, 100 * found.accuracy_plus


def _all_answered(records: Sequence[Record]) -> None:
    failed = [record.error for record in records if record.error]
    if failed:
        raise LoadError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")


def _cause(log: str) -> str:
    """What the plugin objects to, else the last line of the log."""
    _, found, refusal = log.partition("vllm-autoprune: ")
    told = refusal if found else log.strip().splitlines()[-1]
    return " ".join(told.split())[:300]
