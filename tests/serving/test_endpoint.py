"""`GET /v1/autoprune` describes the served state if the operator enables it."""

from __future__ import annotations

import json

import httpx
import pytest

from benchmarks.server import Server
from vllm_autoprune import load_state
from vllm_autoprune.serving.api.endpoint import PATH

pytestmark = pytest.mark.engine


def test_endpoint_describes_the_state_on_every_front_end(two_front_ends: Server) -> None:
    state = load_state("autoprune")
    for _ in range(8):
        description = json.loads(two_front_ends.get(PATH))
        assert (description["state"], description["digest"]) == (state.name, state.digest)
        assert description["budget"]["k"] == 16
        assert (description["core"], description["recall"]) == (None, 5)
        assert description["evidence"] == state.provenance.model_dump(mode="json")


def test_endpoint_is_read_only(two_front_ends: Server) -> None:
    status, _ = two_front_ends.post(PATH, {"state": "visionzip"})
    assert status == 405


def test_endpoint_is_off_by_default(pruned: Server) -> None:
    with pytest.raises(httpx.HTTPStatusError) as caught:
        pruned.get(PATH)
    assert caught.value.response.status_code == 404
