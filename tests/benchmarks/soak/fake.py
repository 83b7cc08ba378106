"""A server that plans requests as the plugin does, and answers without a model.

Knows nothing about soaks. ``Faults`` say what it does wrong.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.serving.unit.samples import served
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.choice import called_by, choose_for
from vllm_autoprune.serving.placeholders import Extent
from vllm_autoprune.serving.request import read_request
from vllm_autoprune.serving.rules import RequestRules

TOKENS, BUDGET, TEXT, KV_BYTES = 144, 8, 20, 3072


@dataclass(frozen=True)
class Faults:
    """Every how many requests one is answered by 500, broken off, forgotten, or falls back."""

    failed: int = 0
    broken: int = 0
    forgotten: int = 0
    fallen: int = 0


@contextmanager
def serving(faults: Faults = Faults()) -> Iterator[str]:
    """The URL of a server, until the block ends."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    state = replace(served(), rules=RequestRules("states", 1, 65536))

    def planned(body: dict[str, object]) -> int:
        """Prompt tokens of a request, which is counted; raises AutopruneError."""
        kwargs = body.get("mm_processor_kwargs")
        asked = read_request(kwargs["autoprune"] if isinstance(kwargs, dict) else None)
        images = json.dumps(body["messages"]).count('"type": "image_url"')
        choices = choose_for(state, asked, [Extent(TOKENS)] * images)
        kept = sum(choice.kept for choice in choices)
        counts[f'autoprune_requests_total{{policy="{called_by(state, asked)}"}}'] += 1
        counts[f'autoprune_images_total{{keep="{asked.keep}"}}'] += images
        counts['autoprune_visual_tokens_total{stage="before"}'] += images * TOKENS
        counts['autoprune_visual_tokens_total{stage="after"}'] += kept
        counts["autoprune_kv_bytes_saved_total"] += (images * TOKENS - kept) * KV_BYTES
        return TEXT + kept

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            with lock:
                lines = [f"{name} {float(count)}" for name, count in sorted(counts.items())]
            self._say(200, "\n".join(lines) + "\n")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                status, text = self._answer(body)
            if status:
                self._say(status, text)

        def _answer(self, body: dict[str, object]) -> tuple[int, str]:
            counts["seen"] += 1
            turn = {
                fault: every and counts["seen"] % every == 0
                for fault, every in vars(faults).items()
            }
            if turn["failed"]:
                return 500, "made to fail"
            if turn["broken"]:
                return 0, ""
            before = Counter(counts)
            try:
                prompt = planned(body)
            except AutopruneError as error:
                counts["autoprune_requests_refused_total"] += 1
                return 400, str(error)
            answer = int(str(body["max_tokens"]))
            ended = 'vllm:request_success_total{engine="0",finished_reason="length"}'
            counts[ended] += 1
            counts['vllm:prompt_tokens_total{engine="0"}'] += prompt
            counts['vllm:generation_tokens_total{engine="0"}'] += answer
            if turn["forgotten"]:
                counts.clear()
                counts.update(before)
            if turn["fallen"]:
                counts['autoprune_fallbacks_total{kept="uniform",reason="scores"}'] += 1
            usage = {"prompt_tokens": prompt, "completion_tokens": answer}
            return 200, json.dumps({"usage": usage})

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
