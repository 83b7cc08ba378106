"""Settings of a search and of its endpoints; flags and their help are made from the fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    PositiveInt,
    model_validator,
)

from vllm_autoprune.connection import Header
from vllm_autoprune.errors import BudgetError
from vllm_autoprune.flags import refuse_value
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.tokens import Positions

Strategy = Literal[
    "autoprune", "autoprune+", "evoprompting", "openevolve", "random", "tpe"
]

Objective = Literal["quality", "mme"]
Library = Literal["searched", "paper"]
Space = Literal[
    "all",
    "numbers",
    "released",
    "without-diversity",
    "without-fusion",
    "without-anchoring",
]

MAX_QUOTA = 640
"""Largest q_e that the language allows; a selector limits it to K."""

STRATEGIES_WITH_LISTS = ("autoprune", "autoprune+")
"""Strategies that may ask a language model for several proposals at once."""

RACED_PER_PLACE = 3
"""Number of candidates that are proposed for each of a round's m places if candidates are raced."""

MODEL_SHARE = 0.3
"""Share of the candidates of a round with a race that a language model writes."""

_MAX_ROUNDS_FACTOR = 4
"""A search with a fixed number of evaluations runs at most this many times T rounds."""

DEFAULT_BLOCK = 128
"""Number of questions that a candidate is asked if it is not dropped."""

DEFAULT_LIST = 5
"""Number of proposals in a reply of a model behind an endpoint: one for each purpose."""


def _require_known_policy(name: str) -> str:
    if name not in BASE_POLICIES:
        fix = f"give {', '.join(BASE_POLICIES)}"
        raise refuse_value(f"{name!r} is not known", fix)
    return name


def _read_budget(said: object) -> int | str:
    """Parse a budget to K, or to a share of N in its shortest form."""
    try:
        return BudgetCall.parse(said).rule()
    except BudgetError as error:
        problem = error.problems[0]
        raise refuse_value(problem.what, problem.fix) from None


_BasePolicy = Annotated[str, AfterValidator(_require_known_policy)]
Budget = Annotated[int | str, BeforeValidator(_read_budget)]
_Temperature = Annotated[
    float, Field(ge=0.0, le=2.0, description="sampling temperature of the proposer")
]
_ReplyTokens = Annotated[
    int,
    Field(
        ge=64, le=32768, description="maximum tokens of a proposal, thoughts among them"
    ),
]
_ListLength = Annotated[int, Field(ge=1, le=20)]
_Amount = Annotated[float, Field(ge=0)]


_OWN_FIELDS = (
    "model",
    "messages",
    "temperature",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "n",
)
"""Fields of a request that the search itself sets."""


def _read_options(text: object) -> object:
    """Parse JSON from a text, or from the file that it names."""
    if not isinstance(text, str):
        return text
    fix = """give an object, such as '{"reasoning_effort": "high"}', or a file that holds one"""
    # The name must not have ": ", which would end the reason in the message.
    name = ascii(text[:80]).replace(": ", ":")
    try:
        is_file = not text.lstrip().startswith(("{", "["))
        options = json.loads(Path(text).read_text("utf-8-sig") if is_file else text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        what = f"{name} is not JSON ({error.msg} at {where})"
        raise refuse_value(what, fix) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise refuse_value(f"{name} cannot be read ({reason})", fix) from None
    if not isinstance(options, dict):
        raise refuse_value("is no JSON object", fix)
    if taken := sorted(options.keys() & set(_OWN_FIELDS)):
        what = f"{taken[0]} is set by the search"
        raise refuse_value(what, "leave it out, or give its flag")
    return options


_Options = Annotated[dict[str, JsonValue], BeforeValidator(_read_options)]


class SearchChoices(FrozenModel):
    """What is searched, and how: the recorded settings that have a flag of their own."""

    strategy: Strategy = Field(
        default="autoprune+",
        description="autoprune+, autoprune, evoprompting, openevolve, random or tpe",
    )
    rounds: int = Field(
        default=10, ge=1, le=10_000, description="T, rounds of proposals"
    )
    per_round: int = Field(
        default=5, ge=1, le=1000, description="m, candidates per round"
    )
    base_policy: _BasePolicy = Field(
        default="cdpruner", description="pi_P, base policy of every candidate"
    )
    other_bases: tuple[_BasePolicy, ...] = Field(
        default=(),
        title="NAME",
        description="base policies that candidates may have instead",
    )
    budgets: tuple[Budget, ...] = Field(
        default=(32,),
        min_length=1,
        title="K",
        description="tokens kept of an image, or a share of them such as 1/8; with several, every "
        "candidate is measured at each",
    )
    objective: Objective = Field(
        default="quality",
        description="quality: log-probability of the reference answers; mme: MME's total",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="seed of all random choices"
    )
    space: Space = Field(
        default="all",
        description="any state (all), or the state autoprune with its six numbers searched "
        "(numbers), its signals and weights too (released), or one of its ablations "
        "(without-diversity, without-fusion, without-anchoring)",
    )
    core: bool = Field(
        default=False,
        description="candidates may split K into a core without the question and a delta",
    )
    library: Library = Field(
        default="searched",
        exclude_if=lambda library: library == "searched",
        description="atoms that candidates have: those that the search varies (searched), or the "
        "paper's 131 without extensions, for a language model also source, budget, safety and "
        "r_min (paper)",
    )
    rank_at: bool = Field(
        default=False,
        description="candidates may rank tokens before the patch merger; for models that have one",
    )
    positions: Positions = Field(
        default="packed",  # the value of ledgers without this field
        exclude_if=lambda positions: positions == "packed",
        description="where kept tokens stand under candidates: true, spread or packed",
    )
    question_free: bool = Field(
        default=False,
        exclude_if=lambda is_set: not is_set,
        description="candidates may not read the question, so that all questions about an image "
        "share its KV",
    )
    block: int = Field(
        default=DEFAULT_BLOCK,
        ge=8,
        exclude_if=lambda size: size == DEFAULT_BLOCK,
        title="N",
        description="questions that a candidate is asked in full, by each model; where the search "
        "split has more, every round has fresh ones, in proportion of the categories",
    )
    resolution: float | None = Field(
        default=None,
        ge=0,
        exclude_if=lambda resolution: resolution is None,
        title="R",
        description="difference of objectives below which candidates are tied; default: what the "
        "budget can tell apart, without fresh questions nothing",
    )


class Settings(SearchChoices):
    """Settings of one search; equal settings, replies and evaluations give equal ledgers."""

    equal_evaluations: bool = Field(
        default=False,
        description="go on past T rounds until T x m full evaluations are spent",
    )
    confirmed: int = Field(
        default=5, ge=1, le=50, description="best candidates to measure on validation"
    )
    proposer: str = Field(default="", description="model that proposes; empty: none")
    proposals_per_reply: _ListLength = Field(
        default=1, description="proposals that a language model writes at once"
    )
    temperature: _Temperature = 1.0
    reply_tokens: _ReplyTokens = 1024
    proposer_options: str = Field(
        default="",
        exclude_if=lambda text: not text,
        description="more fields of every request to the proposer, as JSON",
    )
    unsent: tuple[str, ...] = Field(
        default=(),
        exclude_if=lambda names: not names,
        description="fields that the proposer is not sent, because its endpoint refuses them",
    )
    evaluator: str = Field(
        default="", description="model and data that candidates are measured on"
    )
    models: tuple[str, ...] = Field(
        default=(),
        exclude_if=lambda names: not names,
        description="models that every candidate is measured on; empty: one, that of the evaluator",
    )
    default_state: str = Field(
        default="",
        exclude_if=lambda name: not name,
        description="default state of the served model's family, with which the winner is "
        "compared; empty if the family is not known",
    )

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> Settings:
        if len(set(self.budgets)) < len(self.budgets):
            raise refuse_value("a budget is given twice", "leave one out", "budgets")
        writes = self.proposer and self.strategy in STRATEGIES_WITH_LISTS
        if self.proposals_per_reply > 1 and not writes:
            names = " and ".join(STRATEGIES_WITH_LISTS)
            what = f"only {names} ask for lists, of a language model"
            raise refuse_value(what, "leave it out", "proposals_per_reply")
        if self.space != "all" and self.library == "paper":
            what = f"the space {self.space} has atoms of its own"
            raise refuse_value(what, "leave others out", "space", "library")
        for name in (self.base_policy, *self.other_bases):
            if self.question_free and BASE_POLICIES[name].reads_instruction:
                what = f"{name} reads the question"
                fix = "give a base policy that does not, or leave it out"
                raise refuse_value(what, fix, "question_free")
        largest = max(BudgetCall.parse(budget).range()[1] for budget in self.budgets)
        if self.space == "without-anchoring" and largest > MAX_QUOTA:
            what = f"anchoring cannot be removed above K = {MAX_QUOTA}, the largest q_e"
            raise refuse_value(what, "give a smaller K", "space", "budgets")
        return self

    @property
    def bases(self) -> tuple[str, ...]:
        """Base policies to choose from, the search's own first; empty if there is no choice."""
        names = dict.fromkeys((self.base_policy, *self.other_bases))
        return tuple(names) if self.other_bases else ()

    @property
    def source_budget(self) -> int:
        """The largest K of the first budget; the candidates' states have this budget."""
        budget = self.budgets[0]
        return (
            budget if isinstance(budget, int) else BudgetCall.parse(budget).range()[1]
        )

    @property
    def total_candidates(self) -> int:
        """T x m: the evaluation budget, in evaluations of the whole search split."""
        return self.rounds * self.per_round

    @property
    def races(self) -> bool:
        """Whether candidates are raced: more are proposed, and most are dropped early."""
        return self.strategy == "autoprune+"

    @property
    def has_fixed_evaluations(self) -> bool:
        """Whether rounds go on until T x m evaluations are spent, instead of ending after T."""
        return self.equal_evaluations or self.races

    @property
    def maximum_rounds(self) -> int:
        """The largest number of rounds that the search may take."""
        return self.rounds * (_MAX_ROUNDS_FACTOR if self.has_fixed_evaluations else 1)

    @property
    def objective_unit(self) -> str:
        """The unit of the objective."""
        if self.models:
            return "of the base policy's loss"
        return "thousand points" if self.objective == "mme" else "nats"

    @property
    def objective_text(self) -> str:
        """Name of the objective, with its unit."""
        what = (
            "mean log-probability of the reference answer less the full-token model's"
        )
        if self.objective == "mme":
            what = "MME's total less that of the model with all tokens"
        if self.models:
            return f"{what}, as a share {self.objective_unit}, mean of {' and '.join(self.models)}"
        return f"{what}, in {self.objective_unit}"


class EvaluationOptions(FrozenModel):
    """Locations of the questions and the served models."""

    data: Path | None = Field(
        default=None,
        title="FILE|FOLDER",
        description="questions as for eval, which are split by image, or a folder with "
        "search.jsonl, validation.jsonl and test.jsonl",
    )
    images: PositiveInt | None = Field(
        default=None, description="maximum number of images of each split"
    )
    server_url: list[str] = Field(
        default=[],
        title="URL",
        description="vllm serve with --autoprune-requests states; repeat it for several servers: "
        "those of one model share the questions, several models are asked each of them",
    )
    server_model: str | None = Field(
        default=None,
        title="NAME",
        description="model to evaluate, if a server has several; all servers need it",
    )
    checkpoint: Path | None = Field(
        default=None,
        description="folder of a served LLaVA-1.5, to detect candidates that keep the same tokens",
    )
    text_tower: Path | None = Field(
        default=None,
        description="with --checkpoint: the text tower that the server uses",
    )


class ProposerOptions(FrozenModel):
    """Address, sampling and cost limits of the language model."""

    proposer_url: str | None = Field(
        default=None,
        title="URL",
        description="OpenAI-compatible endpoint; default: no language model",
    )
    proposer_model: str | None = Field(
        default=None, title="NAME", description="model at --proposer-url"
    )
    proposer_key_env: str = Field(
        default="OPENAI_API_KEY",
        description="environment variable that holds the API key",
    )
    proposer_header: list[Header] = Field(
        default=[],
        title="NAME=VALUE",
        description="header of every request to the proposer; repeatable",
    )
    proposer_options: _Options | None = Field(
        default=None,
        title="JSON",
        description="more fields of every request to the proposer, or a file that holds them: "
        """'{"reasoning_effort": "high"}'""",
    )
    temperature: _Temperature = 1.0
    reply_tokens: _ReplyTokens = 1024
    proposals_per_reply: _ListLength | None = Field(
        default=None,
        title="N",
        description="proposals that the language model writes at once, with different purposes "
        f"and a hypothesis each; default with --proposer-url in autoprune and autoprune+: "
        f"{DEFAULT_LIST}, else 1",
    )
    price: tuple[_Amount, _Amount] = Field(
        default=(0.0, 0.0),
        title="IN OUT",
        description="price of a million prompt and completion tokens",
    )
    most_money: _Amount | None = Field(
        default=None,
        title="M",
        description="send the proposer no further requests once M is spent, at --price; a round in "
        "flight may exceed it",
    )
    no_seeds: bool = Field(
        default=False, description="send no seed, for endpoints that fail on one"
    )
