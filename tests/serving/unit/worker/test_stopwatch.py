from __future__ import annotations

import time

import pytest
import torch

from vllm_autoprune.serving.worker.stopwatch import Stopwatch


def test_every_block_is_collected_once() -> None:
    watch = Stopwatch(torch.device("cpu"))
    assert watch.collect() == []
    for seconds in (0.02, 0.0):
        with watch.measure():
            time.sleep(seconds)
    first, second = watch.collect()
    assert 0.02 <= first < 5
    assert 0 <= second < first
    assert watch.collect() == []


def test_a_block_that_raises_is_not_timed() -> None:
    watch = Stopwatch(torch.device("cpu"))
    with pytest.raises(RuntimeError), watch.measure():
        raise RuntimeError
    assert watch.collect() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_collect_does_not_wait_for_the_gpu() -> None:
    watch = Stopwatch(torch.device("cuda"))
    with watch.measure():
        torch.cuda._sleep(200_000_000)
    assert watch.collect() == []
    torch.cuda.synchronize()
    (seconds,) = watch.collect()
    assert seconds > 0.01
