from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offline_search.components import SelectionProgram
from offline_search.programs import SIGNALS, select_with_program
from offline_search.prompt import INITIAL_PROGRAM
from vllm_autoprune.errors import SelectionError
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.safety import synthetic_probes

TOKENS = synthetic_probes(8)[0]
HEAD = "import numpy as np\ndef select(features, signals, K):\n    "


async def select(body: str, budget: int = 8) -> list[list[int]]:
    kept = await select_with_program(SelectionProgram(HEAD + body), TOKENS, "cdpruner", budget)
    rows: list[list[int]] = kept.tolist()
    return rows


async def test_a_program_is_given_features_and_every_signal() -> None:
    for name in SIGNALS:
        shape = (8,) if name == "reference" else (TOKENS.count,)
        check = f"assert signals[{name!r}].shape == {shape}"
        assert await select(f"{check}\n    return range(K)") == [list(range(8))] * TOKENS.batch
    norms = TOKENS.features.float().norm(dim=2)
    best = norms.topk(8).indices.sort(1).values.tolist()
    assert await select("return np.argsort(-np.linalg.norm(features, axis=1))[:K]") == best
    policy = BASE_POLICIES["cdpruner"]
    picks = policy.select_picks(policy.default_params, TOKENS, 8).sort(1).values.tolist()
    assert await select("return signals['reference']") == picks
    initial = SelectionProgram(INITIAL_PROGRAM)
    kept = await select_with_program(initial, TOKENS, "cdpruner", 8)
    for own, reference in zip(kept.tolist(), picks, strict=True):
        assert len(set(own) & set(reference)) == 7


async def test_images_do_not_influence_one_another() -> None:
    body = "return np.random.permutation(len(features))[:K]"
    rows = await select(body)
    assert rows == await select(body) and all(row == rows[0] for row in rows)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [0] * K", "1 different indices instead of 8"),
        ("return range(K - 1)", "7 different indices instead of 8"),
        ("return range(-1, K - 1)", "an index outside 0 to"),
        ("return range(len(features) - K + 1, len(features) + 1)", "an index outside 0 to"),
        ("return [0.5] * K", "cannot be interpreted as an integer"),
        ("return None", "TypeError"),
        ("return features['x']", "IndexError"),
        ("import sys; print('7', file=sys.__stdout__); return range(K)", "no list of indices"),
        ("import os; os._exit(0)", "no list of indices"),
        ("import os, sys; os.write(1, b'[]'); os._exit(0)", "0 selections for"),
    ],
)
async def test_other_results_are_errors(body: str, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        await select(body)


async def test_it_is_confined_as_programs_that_return_states(tmp_path: Path) -> None:
    for body in (
        f"return open({str(tmp_path / 'x')!r}, 'w')",
        f"np.save({str(tmp_path / 'x.npy')!r}, features)",
        "import os; os.fork()",
        "import socket; socket.socket()",
    ):
        with pytest.raises(SelectionError, match=r"Permission|not permitted|No module|import"):
            await select(body)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SelectionError, match=r"MemoryError|Unable to allocate"):
        await select("return np.ones(10**9)")


async def test_all_tokens_are_kept_without_running_it() -> None:
    kept = await select("raise ValueError", TOKENS.count)
    assert torch.equal(torch.tensor(kept[0]), torch.arange(TOKENS.count))
