"""A search over several models: one scale for all, each beside the mean, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from offline_search.candidates import base_state
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers
from offline_search.ledger import (
    ALL_TOKENS,
    EvaluationRecord,
    ProposalRecord,
    SettingsRecord,
    TrialRecord,
    WinnerRecord,
    read_ledger,
    select_records,
)
from offline_search.models import ModelScales
from tests.offline_search.synthetic import (
    MODELS,
    SIZE,
    Change,
    Searches,
    answer_search,
    endpoint,
    model_list,
    settings_of,
)
from vllm_autoprune import load_state
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import ConfigError, SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Floats

NAMES = ("small", "large")
BASE = base_state(settings_of()).digest


def weigh(*factors: float) -> Change:
    """Answers in which each model loses so many times as much; models are asked in turn."""

    def change(job: EvaluationJob, answers: Answers) -> Answers:
        losses = np.array(answers.logprob) + 1.0
        of_model = np.tile(factors, len(losses))[job.start % len(factors) :]
        weighed = -1.0 + losses * of_model[: len(losses)]
        # What suits the one model costs the other a little.
        if job.candidate is not None and job.candidate.digest != BASE:
            weighed += 0.01 * (of_model[: len(losses)] == factors[0])
        return Answers(tuple(weighed.tolist()), answers.right)

    return change


async def test_each_model_counts_alike_however_much_it_loses(search: Searches) -> None:
    winner = await search(models=NAMES, change=weigh(1.0, 7.0))
    logprobs = {
        record.digest: np.array(record.logprob).reshape(-1, 2).mean(0)
        for record in search.records(EvaluationRecord)
        if record.split == "search"
    }

    def lose(digest: str) -> Floats:
        loss: Floats = logprobs[ALL_TOKENS] - logprobs[digest]
        return loss

    losses = dict(zip(NAMES, lose(BASE), strict=True))
    assert winner.losses == pytest.approx(losses, abs=1e-4)
    digests = {record.name: record.digest for record in search.records(ProposalRecord)}
    trials = [t for t in search.records(TrialRecord) if t.status == "evaluated"]
    assert len(trials) > 2
    for trial in trials:
        shares = lose(digests[trial.name]) / lose(BASE)
        assert trial.objective == pytest.approx(-shares.mean(), abs=1e-4)
        assert trial.examples == 2 * SIZE
    assert winner.searched["base"] == pytest.approx(-1.0, abs=1e-4)


async def test_each_model_stands_beside_the_mean(search: Searches) -> None:
    winner = await search(models=NAMES, change=weigh(1.0, 3.0), rounds=2)
    test = winner.test
    gains = [test.models[name].gain.value for name in NAMES]
    assert test.gain.value == pytest.approx(np.mean(gains), abs=1e-5)
    state = load_state(winner.state)
    scores = state.provenance.scores
    assert scores["base_policy_losses"] == winner.losses
    for name in NAMES:
        assert f" on {name}" in state.provenance.notes.partition("by model")[2]
    task, request = (m["content"] for m in search.proposer.requests[-1])
    assert "N and the categories are each model's own" in task, "K is a number"
    assert "suit 2 models: small, large" in task and "-1 is about as the base" in task
    assert "- small: digit:" in request or "- large: digit:" in request
    assert "; small +" in request or "; small -" in request
    assert (
        "48 questions in its round, the same in every round, by each model in"
        in request
    )
    assert "means over a few images of each model of the number of tokens" in request
    assert re.search(r"; exchanges \d\.\d tokens on small, \d\.\d on large; ", request)
    assert "several models: small, large" in search.lines


async def test_what_several_models_cannot_share_is_refused(search: Searches) -> None:
    with pytest.raises(ConfigError, match="mme is the total of one model, not of 2"):
        await search(models=NAMES, objective="mme")
    with pytest.raises(SearchError, match="nats on large, too little to measure"):
        await search(models=NAMES, change=weigh(1.0, 0.0), ledger="other")


def test_a_share_of_the_questions_is_scaled_by_the_models_that_were_asked() -> None:
    examples = [
        Example(
            image=str(number // 2), question="Q?", answer="a", model="ab"[number % 2]
        )
        for number in range(8)
    ]
    scales = ModelScales.measure(examples, np.tile([-2.0, -0.5], 4))
    assert scales.losses == {"a": 2.0, "b": 0.5}
    scaled = scales.apply(examples, np.array([-1.0, -1.0, 1.0]))
    assert scaled.tolist() == [-0.5, -2.0, 0.5]
    alone = [example.model_copy(update={"model": ""}) for example in examples]
    assert ModelScales.measure(alone, np.full(8, 1.0)) == ModelScales()
    assert "model" not in alone[0].model_dump()


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Flags of two servers, of the models a and b."""
    with ExitStack() as stack:
        servers = [stack.enter_context(endpoint(answer_search)) for _ in "ab"]
        for name, server in zip("ab", servers, strict=True):
            server.pages[MODELS] = model_list(name)
        yield [word for server in servers for word in ("--server-url", server.url)]


def test_the_command_searches_on_servers_of_several_models(
    urls: list[str], data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = str(tmp_path / "l.jsonl")
    flags = ["search", "--data", str(data.folder), "--ledger", ledger, *urls]
    flags += ["--strategy", "random", "--rounds", "1", "--budget", "1/8"]
    assert main([*flags, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"]["validation"] == 2 * SIZE * 7
    assert main([*flags, "--objective", "mme"]) == 1
    assert "mme is the total of one model" in capsys.readouterr().err
    output = tmp_path / "s.json"
    assert main([*flags, "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "Winner by model, test split" in printed and "| b |" in printed
    records = read_ledger(Path(ledger))
    (opened,) = select_records(records, SettingsRecord)
    assert opened.settings.models == ("a", "b")
    (winner,) = select_records(records, WinnerRecord)
    assert winner.test.examples == 2 * SIZE and winner.model_gains.keys()
    written = (tmp_path / "s.test.jsonl").read_text().splitlines()
    assert len(written) == SIZE and '"model"' not in written[0]
    again = ["search", "--data", str(data.folder), "--replay", ledger]
    assert main([*again, "--ledger", str(tmp_path / "again.jsonl")]) == 0
