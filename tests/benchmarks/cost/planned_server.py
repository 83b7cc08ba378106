"""A fake server that plans requests with the plugin's own code and counts them in ``/metrics``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.cost.soak_requests import BLOCK
from tests.serving.unit.samples import served
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.api.choices import TokenCount, resolve_choices, state_label
from vllm_autoprune.serving.api.request import RecallTurn, parse_request
from vllm_autoprune.serving.api.split import SplitImage, align_core, choose_recalls
from vllm_autoprune.serving.settings import RequestRules
from vllm_autoprune.tpdsl.loading import load_state

TOKENS, BUDGET, RECALL, TEXT, KV_BYTES = 144, 8, 4, 20, 3072
START = 5
"""Tokens of a prompt in front of its image."""


@dataclass(frozen=True)
class Faults:
    """Every n-th request is answered by 500, dropped, not counted, or falls back; 0: none."""

    failed: int = 0
    broken: int = 0
    forgotten: int = 0
    fallen: int = 0


class PlannedReplies:
    """Replies and counters as the plugin's own planning gives them."""

    def __init__(self, faults: Faults) -> None:
        self.counts: Counter[str] = Counter()
        self._faults = faults
        rules = RequestRules("states", 1, 65536, recall=RECALL)
        self._state = replace(served(), state=load_state("autoprune"), rules=rules)

    def metrics(self) -> str:
        return "".join(f"{name} {float(count)}\n" for name, count in sorted(self.counts.items()))

    def reply(self, body: Body) -> Reply:
        counts = self.counts
        counts["seen"] += 1
        due = {
            fault: every and counts["seen"] % every == 0
            for fault, every in vars(self._faults).items()
        }
        if due["failed"]:
            return Reply(status=500, error="made to fail")
        if due["broken"]:
            return Reply(drop=True)
        before = Counter(counts)
        try:
            prompt = self._plan(body)
        except AutopruneError as error:
            counts["autoprune_requests_refused_total"] += 1
            return Reply(status=400, error=str(error))
        answer = int(body["max_tokens"])
        if not body.get("stream"):  # its client hangs up
            counts['vllm:request_success_total{engine="0",finished_reason="length"}'] += 1
            counts['vllm:request_generation_tokens_bucket{engine="0",le="5.0"}'] += 1
        counts['vllm:prompt_tokens_total{engine="0"}'] += prompt
        counts['vllm:generation_tokens_total{engine="0"}'] += answer
        if due["forgotten"]:
            counts.clear()
            counts.update(before)
        if due["fallen"]:
            counts['autoprune_fallbacks_total{fallback="uniform",reason="scores"}'] += 1
        return Reply(ttft=0.01, usage={"prompt_tokens": prompt, "completion_tokens": answer})

    def _plan(self, body: Body) -> int:
        """Prompt tokens of a request, which is counted; raises AutopruneError."""
        kwargs = body.get("mm_processor_kwargs")
        request = parse_request(kwargs["autoprune"] if isinstance(kwargs, dict) else None)
        images = json.dumps(body["messages"]).count('"type": "image_url"')
        choices = resolve_choices(self._state, request, [TokenCount(TOKENS)] * images)
        later = [turn for turn in body["messages"][1:] if turn["role"] == "user"]
        turns = [RecallTurn(images=images, text=turn["content"]) for turn in later]
        recall = RECALL if request.recall is None else request.recall
        contents = [str(i) for i in range(images)]
        recalled = sum(part.budget for part in choose_recalls(turns, recall, choices, contents))
        kept = sum(choice.kept for choice in choices) + recalled
        core = sum(
            align_core(START, SplitImage(choice.kept, choice.core, None), BLOCK)
            for choice in choices
            if choice.core
        )
        called = state_label(self._state, request)
        self.counts[f'autoprune_requests_total{{state="{called}"}}'] += 1
        self.counts[f'autoprune_images_total{{chooser="{request.keep}"}}'] += images
        self.counts['autoprune_visual_tokens_total{stage="before"}'] += images * TOKENS
        self.counts['autoprune_visual_tokens_total{stage="after"}'] += kept
        self.counts["autoprune_core_tokens_total"] += core
        self.counts["autoprune_recalled_tokens_total"] += recalled
        self.counts["autoprune_kv_bytes_saved_total"] += (images * TOKENS - kept) * KV_BYTES
        return TEXT + kept


@contextmanager
def serve_planned(faults: Faults = Faults()) -> Iterator[str]:
    """The URL of such a server, until the block ends."""
    replies = PlannedReplies(faults)
    with fake_server(replies.reply, model=None, pages={"/metrics": replies.metrics}) as server:
        yield server.url
