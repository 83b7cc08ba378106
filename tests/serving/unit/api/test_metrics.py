from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY

from vllm_autoprune.serving.api.metrics import count_refused_request, count_request
from vllm_autoprune.serving.api.pruning_choice import ImageChoice


@pytest.fixture
def grown() -> Callable[..., float]:
    """Increase of a counter since the test began."""
    before = {s.name + str(s.labels): s.value for f in REGISTRY.collect() for s in f.samples}

    def by(name: str, **labels: str) -> float:
        now = REGISTRY.get_sample_value(name, labels)
        return (now or 0.0) - before.get(name + str(labels), 0.0)

    return by


def test_a_request_and_its_images(grown: Callable[..., float]) -> None:
    count_request("dart", [ImageChoice(16, 144, "state"), ImageChoice(144, 144, "state")], 100)
    count_request("off", [ImageChoice(50, 50, "random")], 100)
    assert grown("autoprune_requests_total", state="dart") == 1
    assert grown("autoprune_requests_total", state="off") == 1
    assert grown("autoprune_images_total", chooser="state") == 2
    assert grown("autoprune_images_total", chooser="random") == 1
    assert grown("autoprune_visual_tokens_total", stage="before") == 338
    assert grown("autoprune_visual_tokens_total", stage="after") == 210
    assert grown("autoprune_kv_bytes_saved_total") == 12_800


def test_a_refusal(grown: Callable[..., float]) -> None:
    count_refused_request()
    assert grown("autoprune_requests_refused_total") == 1
    assert grown("autoprune_images_total", chooser="state") == 0
