"""Synthetic search task with a known optimum, and answers of an endpoint that is made for it.

The score of a state depends on the weight of its relevance signal, its quota (best: four) and its
merge strength (best: zero), plus noise of which all states share a part.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image
from pydantic import JsonValue

from offline_search.candidates import Expectation, Hypothesis
from offline_search.choices import RandomSource
from offline_search.components import JsonObject
from offline_search.dataset import SPLITS, Dataset, read_dataset, write_split
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers, Trial
from offline_search.image_facts import ImageFacts
from offline_search.ledger import (
    Cost,
    Ledger,
    ProposalRecord,
    R,
    Status,
    TrialRecord,
    WinnerRecord,
    digest_records,
    read_ledger,
    select_records,
)
from offline_search.probes import Probes
from offline_search.prompt import Messages
from offline_search.proposer import Reply
from offline_search.report import ProgressLog
from offline_search.search import Search
from offline_search.search_space import sample_proposal
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from tests.fake_server import Answer, Body, FakeServer, fake_server
from vllm_autoprune.errors import EvaluationFailed
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.safety import synthetic_probes
from vllm_autoprune.tpdsl.state import PruningState

MODELS = "/v1/models"
BUDGET = 8
IMAGE_TOKENS = 64
SIZE = 24
"""Examples of each split."""


def _answer(status: int, body: object, headers: dict[str, str] | None = None) -> Answer:
    return status, json.dumps(body).encode(), headers or {}


def completion(text: str | None, *, refusal: str = "", **fields: object) -> Answer:
    """Response with a chat completion of this text, and more fields beside its choices."""
    message = {"role": "assistant", "content": text, "refusal": refusal or None}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
    return _answer(200, body | {"choices": [choice], "usage": usage} | fields)


def error(
    status: int, message: str = "no", param: str | None = None, **headers: str
) -> Answer:
    """Error response in OpenAI's format."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    fields = {"message": message, "type": "x", "code": status, "param": param}
    return _answer(status, {"error": fields}, names)


def model_list(*names: str) -> Answer:
    """Response with a list of models."""
    return _answer(200, {"object": "list", "data": [{"id": name} for name in names]})


@contextlib.contextmanager
def endpoint(answer: Callable[[Body, int], Answer]) -> Iterator[FakeServer]:
    """Serve until the block ends; ``answer`` maps a request body and its number to a response."""
    numbers = count()
    pages = {MODELS: model_list("m")}
    with fake_server(
        lambda body: answer(body, next(numbers)), model=None, pages=pages
    ) as server:
        yield server


VALID_REPLIES = [
    json.dumps(sample_proposal(RandomSource(Random(seed)), Settings(budgets=(BUDGET,))))
    for seed in range(40)
]

HOSTILE = {
    "empty": "",
    "prose": "First, let us think about relevance. " * 40,
    "cut": VALID_REPLIES[0][:-20],
    "long object": '{"scoring": "' + "x" * 100_000 + '"}',
    "deep": '{"scoring": ' + "[" * 5000 + "]" * 5000 + "}",
    "nan": '{"scoring": NaN, "constraints": Infinity, "reassembly": -Infinity}',
    "twice": '{"scoring": 1, "scoring": 2, "constraints": 3, "reassembly": 4}',
    "surrogate": '{"scoring": "\\ud800", "constraints": 3, "reassembly": 4}',
    "script": '{"scoring": "<script>alert(1)</script>"}',
    "unknown atom": VALID_REPLIES[0].replace("_fusion", "_confusion"),
    "out of range": VALID_REPLIES[0].replace('"weight": ', '"weight": 1e9'),
}
"""Invalid replies by name."""


def list_reply(begin: int, length: int, **changes: JsonValue) -> str:
    """A reply with ``length`` valid proposals, all with the same purpose and hypothesis."""
    fields: JsonObject = {
        "purpose": "explore",
        "hypothesis": f"List {begin}.",
        "expect": "higher",
    }
    chosen = [VALID_REPLIES[(begin + index) % 30] for index in range(length)]
    return json.dumps(
        {"proposals": [fields | changes | json.loads(text) for text in chosen]}
    )


_FILE = io.BytesIO()
Image.new("RGB", (1, 1)).save(_FILE, "PNG")
PIXEL = _FILE.getvalue()
"""A PNG file."""


def dataset(folder: Path, images: int = SIZE // 2) -> Dataset:
    """Data set with two questions per image; what tells images apart is behind their pixels."""
    folder.mkdir(exist_ok=True)
    for split in SPLITS:
        examples = []
        for number in range(images):
            name = f"{split}-{number}.png"
            (folder / name).write_bytes(PIXEL + name.encode())
            examples += [
                Example(
                    image=name,
                    question=f"Is it {n}?",
                    answer=("yes", "no")[n],
                    category=("digit", "colour")[number % 2],
                    pair=number,
                )
                for n in range(2)
            ]
        write_split(folder / f"{split}.jsonl", examples)
    return read_dataset(folder)


Change = Callable[[EvaluationJob, Answers], Answers]


class SyntheticEvaluator:
    """Evaluator that keeps its jobs; ``change`` may return other answers, or raise."""

    image_facts: Mapping[str, ImageFacts] = {}

    def __init__(
        self, data: Dataset, probes: bool = True, change: Change | None = None
    ) -> None:
        self.name = f"synthetic {data.digest[:8]}"
        self.dataset = data
        self.jobs: list[EvaluationJob] = []
        self._probes = probes
        self._change = change or (lambda _, answers: answers)

    def probes(self) -> Probes:
        models = {example.model: None for example in self.dataset.splits["search"]}
        return {model: synthetic_probes(8)[:1] for model in models if self._probes}

    async def evaluate(self, job: EvaluationJob) -> Answers:
        self.jobs.append(job)
        value = 0.0 if job.candidate is None else _score(job.candidate)
        logprob = []
        for example in self.dataset.splits[job.split][job.start : job.stop]:
            shared = Random(f"{example.image} {example.question}").gauss(0, 1)
            single = Random(
                f"{example.image} {example.question} {digest_of(job)}"
            ).gauss(0, 1)
            logprob.append(-1.0 + value + 0.05 * (shared + 0.1 * single))
        answers = Answers(tuple(logprob), tuple(value > -1.2 for value in logprob))
        return self._change(job, answers)


def digest_of(job: EvaluationJob) -> str:
    """Digest of a job's candidate, or ``full``."""
    return "full" if job.candidate is None else job.candidate.digest


def _score(state: PruningState) -> float:
    """Score of a state, at most 0, which the unpruned model has."""
    weights = {call.atom: call.weight for call in state.scoring.signals}
    share = weights.get("instruction_guided_visual_relevance", 0.0) / (
        sum(weights.values()) or 1
    )
    quota = state.constraints.selector.bounds(8)[0]
    merges = float(state.reassembly.model_dump().get("strength", 0.0))
    return -0.8 * (share - 0.6) ** 2 - 0.03 * abs(quota - 4) - 0.5 * merges - 0.01


def failing(digest: str, splits: Sequence[str] = SPLITS) -> Change:
    """Whose evaluations on these splits fail."""

    def fail(job: EvaluationJob, answers: Answers) -> Answers:
        if digest_of(job) == digest and job.split in splits:
            raise EvaluationFailed.of("image", "cannot identify image file")
        return answers

    return fail


class ScriptedProposer:
    """Proposer that chooses among its replies by the request's seed, or takes them in order."""

    def __init__(self, replies: Sequence[str | None], in_order: bool = False) -> None:
        self.replies = replies
        self.requests: list[Messages] = []
        self.schemas: list[JsonObject | None] = []
        self._in_order = in_order

    async def reply(
        self, messages: Messages, schema: JsonObject | None, seed: int
    ) -> Reply:
        number = len(self.requests) if self._in_order else _hash_request(messages, seed)
        self.requests.append(messages)
        self.schemas.append(schema)
        chosen = self.replies[number % len(self.replies)]
        if chosen is None:
            return Reply(None, "the endpoint is down", Cost())
        return Reply(
            chosen, "", Cost(prompt_tokens=100, completion_tokens=50, money=0.01)
        )


def _hash_request(messages: Messages, seed: int) -> int:
    """A number for each request of a search, which no wording of a prompt changes."""
    text = f"{seed} {len(messages)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def answer_search(body: Body, number: int) -> Answer:
    """Served model and proposer in one: equal requests get equal answers.

    The score depends on the signals of the state; one reply in ten is no proposal.
    """
    if "mm_processor_kwargs" not in body:
        reply = _hash_request(tuple(body["messages"]), body.get("seed", 0)) % 10
        schema = (
            body.get("response_format", {}).get("json_schema", {}).get("schema", {})
        )
        if items := schema.get("properties", {}).get("proposals"):
            return completion(
                list_reply(reply, items["minItems"]) if reply else "no proposal"
            )
        return completion(VALID_REPLIES[reply] if reply else "no proposal")
    answer = body["messages"][-1]["content"]
    options = body["mm_processor_kwargs"]["autoprune"]
    value = -0.1 - 0.1 * (
        len(json.dumps(options.get("state", {}).get("scoring", {}))) % 7
    )
    budget = BudgetCall.parse(options.get("budget", IMAGE_TOKENS))
    kept = min(budget.tokens_kept(IMAGE_TOKENS), IMAGE_TOKENS)
    usage = {"prompt_tokens": 9 + kept}
    return completion(
        ".", prompt_logprobs=[None, token(f" {answer}", value)], usage=usage
    )


def token(text: str, logprob: float, rank: int = 1) -> dict[str, Any]:
    """A token of a scored prompt."""
    return {"1": {"logprob": logprob, "rank": rank, "decoded_token": text}}


def settings_of(**changes: object) -> Settings:
    """Settings of a search of three rounds by a language model, with changes."""
    fields: dict[str, object] = {
        "strategy": "autoprune",
        "rounds": 3,
        "per_round": 3,
        "budgets": (BUDGET,),
        "proposer": "scripted",
    }
    return Settings.model_validate(fields | changes)


@dataclass
class Searches:
    """Searches of one test; each is called with the settings that matter to it.

    ``path`` is the ledger of the last one, ``evaluator`` and ``proposer`` what it ran on, and
    ``lines`` its progress.
    """

    data: Dataset
    folder: Path
    path: Path = Path()
    evaluator: SyntheticEvaluator = field(init=False)
    proposer: ScriptedProposer = field(init=False)
    lines: list[str] = field(default_factory=list)

    async def __call__(
        self,
        replies: Sequence[str | None] | ScriptedProposer = VALID_REPLIES[:30],
        evaluator: SyntheticEvaluator | None = None,
        ledger: str = "l",
        most_money: float | None = None,
        change: Change | None = None,
        **changes: object,
    ) -> WinnerRecord:
        if not isinstance(replies, ScriptedProposer):
            replies = ScriptedProposer(replies)
        self.proposer = replies
        self.evaluator = evaluator or SyntheticEvaluator(self.data, change=change)
        self.path = self.folder / ledger
        self.lines = []
        settings = settings_of(**{"evaluator": self.evaluator.name, **changes})
        ordered = self.data.in_blocks(settings.block, settings.seed)
        self.evaluator.dataset = ordered.ask_models(settings.models)
        progress = ProgressLog(self.lines.append)
        with Ledger(self.path) as opened:
            search = Search(
                settings, opened, self.evaluator, self.proposer, most_money, progress
            )
            return await search.run()

    def records(self, kind: type[R]) -> list[R]:
        """Records of one type of the last search, in order."""
        return select_records(read_ledger(self.path), kind)

    def digest(self) -> str:
        """Digest of the last search's ledger."""
        return digest_records(read_ledger(self.path))


def trial(
    name: str,
    values: Sequence[float] | np.ndarray | None = None,
    state: PruningState | None = None,
    status: Status = "evaluated",
    parent: str = "",
    reason: str = "",
    expect: Expectation | None = None,
) -> Trial:
    """A trial with these values of its examples, and a hypothesis where something is expected.

    The reason for the status "same" is the name of the trial that it duplicates.
    """
    number, index = map(int, name.split("."))
    hypothesis = expect and Hypothesis(
        purpose="ablate", text=f"Why {name}.", expect=expect
    )
    proposal = ProposalRecord(
        round=number,
        index=index,
        origin="llm",
        parents=(parent,) if parent else (),
        hypothesis=hypothesis,
        problems=(reason,) if status == "invalid" else (),
    )
    array = None if values is None else np.array(values)
    result = TrialRecord(
        round=number,
        index=index,
        status=status,
        same_as=reason if status == "same" else "",
        reason="" if status == "same" else reason,
        objective=None if array is None else float(np.nanmean(array)),
        examples=0 if array is None else int(np.isfinite(array).sum()),
    )
    return Trial(proposal, result, state, array)


def change(proposal: str) -> str:
    """A reply in OpenEvolve's form that gives any parent the scoring of a proposal."""
    scoring = json.dumps(json.loads(proposal)["scoring"])
    changed = f' "scoring": {scoring},\n "before": {{'
    return f'<<<<<<< SEARCH\n "scoring": {{\n=======\n{changed}\n>>>>>>> REPLACE\n'


REPLIES_OF: dict[str, list[str | None]] = {
    **{name: [*VALID_REPLIES[:9], HOSTILE["prose"], None] for name in STRATEGIES},
    "openevolve": [*map(change, VALID_REPLIES[:6]), "I cannot help with that.", None],
}
"""Replies to each strategy, some of which are no proposals."""
