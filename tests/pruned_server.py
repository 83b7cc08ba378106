"""A fake server that prunes: known times and ``/metrics``, which a probe has to find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.fake_server import Body, FakeServer, Reply, fake_server

TOKEN = 0.0002
REQUEST = 0.02
TOWER = 0.3
DECODE_IMAGE = 0.03
PROCESSOR = 0.04
SELECTION = 0.01
VISUAL = 32
N = 288


@contextmanager
def pruned_server() -> Iterator[FakeServer]:
    """A server that keeps 32 of 288 tokens of an image, with the ``/metrics`` of that."""

    def reply(body: Body) -> Reply:
        *images, text = body["messages"][0]["content"]
        # Words of a few letters are one token here, longer ones two.
        words = sum(1 + (len(word) > 4) for word in text["text"].split())
        tokens = words + VISUAL * len(images)
        usage = {"prompt_tokens": tokens}
        return Reply(deltas=("a", "b"), ttft=TOKEN * tokens, gaps=(0.01,), usage=usage)

    def metrics() -> str:
        # Those of other clients come first: they count for nothing.
        images = 900 + sum(
            len(body["messages"][0]["content"]) - 1 for body in server.requests
        )
        return (
            'vllm:cache_config_info{block_size="32",enable_prefix_caching="True"} 1.0\n'
            f"vllm:request_prefill_time_seconds_count {len(server.requests)}\n"
            f"autoprune_images_total {images}\n"
            f'autoprune_visual_tokens_total{{stage="before"}} {images * N}\n'
            f'autoprune_visual_tokens_total{{stage="after"}} {images * VISUAL}\n'
            f"autoprune_selection_seconds_sum {images * SELECTION}\n"
            f"autoprune_selection_seconds_count {images}\n"
        )

    with fake_server(reply, pages={"/metrics": metrics}) as server:
        yield server
