from __future__ import annotations

import pytest

from tests.tpdsl.samples import edited, sample, state
from vllm_autoprune import StateError, load_state
from vllm_autoprune.serving.shared.state_codec import MAX_ENCODED_BYTES, decode_state, encode_state
from vllm_autoprune.tpdsl.states.load import shipped_states
from vllm_autoprune.tpdsl.states.state import PruningState


@pytest.mark.parametrize("name", shipped_states())
def test_decoded_state_has_the_same_digest(name: str) -> None:
    sent = load_state(name)
    assert decode_state(encode_state(sent)).digest == sent.digest


def test_name_and_provenance_are_not_encoded() -> None:
    other = edited(sample(), {"/name": "other", "/provenance": {"notes": "n" * 50_000}})
    assert encode_state(PruningState.model_validate(other)) == encode_state(state())
    assert encode_state(state({"/constraints/selector/q_e": 3})) != encode_state(state())


def test_state_of_many_signals_fits() -> None:
    signal = {"atom": "spatial_centrality_prior", "weight": 0.125}
    fits = state({"/scoring/signals": [signal] * 32})
    assert len(encode_state(fits)) < MAX_ENCODED_BYTES


def test_more_than_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_state.cache_clear()  # other tests may have encoded this state
    monkeypatch.setattr("vllm_autoprune.serving.shared.state_codec.MAX_ENCODED_BYTES", 100)
    with pytest.raises(StateError, match="100") as caught:
        encode_state(state({"/constraints/selector/q_e": 5}))
    assert caught.value.problems[0].fix
