"""``python -m tests.hostile.mutate``: mutated requests to a server that stock vLLM judges.

Conversations that recall are among them. Exit status 0 without faults.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random

from benchmarks.server import Server, serve
from benchmarks.yardsticks.adapters import ADAPTERS, adapter_flags, write_adapters
from tests.fuzz.generator import MutatedRequest, draw_request
from tests.hostile.site import Client, Reply
from tests.serving.engine import CLIP, LLAVA, examples
from tests.serving.http import ask, body, text_of
from tests.serving.runners import ENVIRONMENTS
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.http_client import CHAT


def send_mutated_requests(
    server: Server, stock: Server, count: int, seed: int = 0, adapters: Sequence[str] = ()
) -> tuple[Counter[str], list[str]]:
    """Send ``count`` requests, four at a time, and hold the server to its promises.

    How often there was which kind of request, status, and server error of it and of stock; faults.
    """
    begun, outcomes, faults = time.monotonic(), Counter[str](), list[str]()
    asked = examples(2)
    client, judge = Client(server), Client(stock)
    bodies = [body(server, example, max_tokens=1) for example in asked]

    def count_answers() -> int:
        """Answers that the engine has finished without an error, by vLLM's own count."""
        name = "vllm:request_success_total"
        return int(client.metric(name) - client.metric(name, finished_reason="error"))

    def exchange(number: int) -> tuple[int, MutatedRequest, Reply, Reply | None]:
        request = draw_request(bodies, Random(f"{seed}/{number}"), (server.model, *adapters))
        reply = client.send(CHAT, request.content)
        # What vLLM reads itself, stock vLLM may refuse or fail too.
        read_by_vllm = reply.failed or request.kind in ("body", "conversation")
        judged = request.stock is not None and read_by_vllm
        return number, request, reply, judge.send(CHAT, request.stock or {}) if judged else None

    before, finished, answers = text_of(ask(server, asked[0])), count_answers(), 0
    failed: list[tuple[str, str]] = []
    with ThreadPoolExecutor(4) as pool:
        for number, request, reply, judgement in pool.map(exchange, range(count)):
            outcomes.update([f"kind {request.kind}", f"status {reply.status}"])
            answers += len(reply.body["choices"]) if reply.status == 200 else 0
            if judgement is not None and judgement.status >= 500:
                outcomes[f"stock: {_cause(judgement)}"] += 1
            if reply.failed:
                outcomes[f"error: {_cause(reply)}"] += 1
                what = f"seed {seed} number {number} ({request.kind}): {request.text[:200]}"
                failed.append((f"stock: {_cause(reply)}", f"{what} -> {reply}"))
                print(f"number {number}: {reply}; stock: {judgement}", flush=True)
            if (number + 1) % 250 == 0:
                spent = f"{number + 1}/{count}, {time.monotonic() - begun:.0f} s"
                print(f"[{spent}] {dict(outcomes)}", flush=True)
    # After the last one: what stock answers to a request depends on those before it.
    faults += (fault for cause, fault in failed if cause not in outcomes)
    if (reached := count_answers() - finished) != answers:
        faults.append(f"the engine gave {reached} answers, and {answers} were received")
    if (after := text_of(ask(server, asked[0]))) != before:
        faults.append(f"a normal request was answered {before!r}, and is now {after!r}")
    return outcomes, faults


def _cause(reply: Reply) -> str:
    """An error's message without the numbers in it."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "…", f"{reply.status} {reply.message[:120]}")


FLAGS = (
    *("--enforce-eager", "--max-model-len", "2048", "--block-size", "32"),
    *("--num-gpu-blocks-override", "1024"),
)
PRUNED = (
    *("--autoprune-state", "minillava-split", "--autoprune-budget", "64"),
    *("--autoprune-text-tower", str(CLIP), "--autoprune-recall", "4"),
    *("--autoprune-requests", "states:1-256", "--autoprune-detail", "low=8,high=64"),
    *("--api-server-count", "2"),
)
START_TIMEOUT = 1200.0
"""Seconds that a server may take to start on a busy machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a server and a stock one, send mutated requests, and report."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = CommandParser(prog="python -m tests.hostile.mutate", description=summary)
    parser.add_argument("--count", type=int, default=10_000, help="number of requests")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--runner", choices=[*ENVIRONMENTS], default="v1", help="model runner")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adapters-")))
        write_adapters(folder)
        flags, env = (*FLAGS, *adapter_flags(folder)), ENVIRONMENTS[options.runner]
        stock, server = (
            stack.enter_context(serve(LLAVA, *flags, *pruning, env=env, patience=START_TIMEOUT))
            for pruning in ((), PRUNED)
        )
        server.await_api_servers(2, START_TIMEOUT)
        outcomes, faults = send_mutated_requests(
            server, stock, options.count, options.seed, adapters=ADAPTERS
        )
    print(f"{options.count} requests, {len(faults)} faults")
    print(*(f"{times:6} {outcome}" for outcome, times in sorted(outcomes.items())), sep="\n")
    print(*faults[:20], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
