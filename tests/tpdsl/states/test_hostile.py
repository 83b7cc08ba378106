from __future__ import annotations

import gc
import json
import time
import tracemalloc

import pytest

from tests.tpdsl.samples import edited, refused, refused_with, sample
from vllm_autoprune import StateError, load_state
from vllm_autoprune.tpdsl.json_text import MAX_BYTES, MAX_VALUES
from vllm_autoprune.tpdsl.loading import MAX_PROBLEMS

HOSTILE = {
    "unknown fields": "{" + ",".join(f'"a{i}":0' for i in range(MAX_VALUES - 9)) + "}",
    "unknown atoms": json.dumps(
        edited(sample(), {"/safety": [f"{i}preserve_bugdet" for i in range(MAX_VALUES - 99)]})
    ),
    "unknown signals": json.dumps(
        edited(sample(), {"/scoring/signals": [{"atom": f"{i}_proxy"} for i in range(3000)]})
    ),
    "keys that occur twice": "{" + '"a":0,' * (MAX_VALUES - 9) + '"b":1}',
    "a long name": json.dumps(edited(sample(), {"/reassembly/atom": "mean_residual" * 80_000})),
    "a long key": json.dumps(edited(sample(), {"/reassembly/" + "strength" * 100_000: 1})),
    "a long list": json.dumps(edited(sample(), {"/reassembly": list(range(9000))})),
    "a long number": json.dumps(sample()).replace('"q_e": 2', '"q_e": ' + "7" * 1_000_000),
    "a long fraction": json.dumps(sample()).replace('"q_e": 2', '"q_e": 0.' + "7" * 1_000_000),
    "quotes": '{"' * 500_000,
    "backslashes": '{"' + "\\" * 1_000_000,
    "pairs of brackets": '{"a": [' + "[]," * 340_000 + "[]]}",
    "objects in objects": '{"a":' * 200_000,
    "too much": "{" + " " * (2 * MAX_BYTES) + "}",
}


@pytest.mark.parametrize("text", [pytest.param(t, id=name) for name, t in HOSTILE.items()])
def test_it_costs_less_than_a_second_and_little_memory(text: str) -> None:
    text = text.replace('{"a0"', '{"schema":"autoprune-state/1","a0"')
    # A busy host and garbage of other tests only ever add time: one quick attempt of five will do.
    assert any(_seconds(text) < 1.0 for _ in range(5))
    with pytest.raises(StateError) as raised:
        load_state(text)
    assert len(raised.value.problems) <= MAX_PROBLEMS + 1 and len(str(raised.value)) < 32_000
    assert str(raised.value).replace("\n", "").isprintable()
    tracemalloc.start()
    try:
        refused(text)
        assert tracemalloc.get_traced_memory()[1] < 48 * MAX_BYTES
    finally:
        tracemalloc.stop()


def _seconds(text: str) -> float:
    """Processor time of this thread to refuse ``text``, without garbage collection."""
    gc.collect()
    gc.disable()
    begun = time.thread_time()
    try:
        refused(text)
        return time.thread_time() - begun
    finally:
        gc.enable()


def test_omitted_problems_are_counted() -> None:
    actual = refused_with({f"/extra{i}": 0 for i in range(1000)})
    assert len(actual) == MAX_PROBLEMS + 1
    assert actual[-1] == ("", f"{1000 - MAX_PROBLEMS} more problem(s)")


def test_control_characters_are_not_repeated() -> None:
    bad = "\x1b[2J\nstate ok: 0 problem(s)\u202e"
    with pytest.raises(StateError) as raised:
        load_state(json.dumps(edited(sample(), {"/reassembly/atom": bad, f"/{bad}": bad})))
    assert len(str(raised.value).splitlines()) == 1 + len(raised.value.problems) == 3
    assert str(raised.value).replace("\n", "").isprintable()
    with pytest.raises(StateError) as raised:
        load_state(bad)
    assert len(str(raised.value).splitlines()) == 2
