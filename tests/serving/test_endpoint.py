"""`GET /v1/autoprune` tells what is served, where the operator turned it on."""

from __future__ import annotations

import json
import urllib.error

import pytest

from benchmarks.server import Server
from vllm_autoprune import load_state
from vllm_autoprune.serving.api.endpoint import PATH

pytestmark = pytest.mark.engine


def test_it_tells_what_every_front_end_serves(two_front_ends: Server) -> None:
    state = load_state("autoprune")
    for _ in range(8):
        description = json.loads(two_front_ends.get(PATH))
        assert (description["state"], description["digest"]) == (state.name, state.digest)
        assert description["budget"]["k"] == 16
        assert description["evidence"] == state.provenance.model_dump(mode="json")


def test_it_changes_nothing(two_front_ends: Server) -> None:
    status, _ = two_front_ends.post(PATH, {"state": "visionzip"})
    assert status == 405


def test_it_is_off_unless_turned_on(pruned: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        pruned.get(PATH)
    assert caught.value.code == 404
    caught.value.close()
