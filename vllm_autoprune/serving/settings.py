"""Settings of a server: one model whose fields define the flags of `vllm serve` and their checks.

A flag writes plain data into ``additional_config["autoprune"]``, which ``LLM(...,
additional_config={"autoprune": {...}})`` fills too, so both ways are handled alike. Whether
settings fit the model is checked in :mod:`.startup`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from vllm_autoprune.errors import (
    AutopruneError,
    BudgetError,
    ConfigError,
    Problem,
    StateError,
)
from vllm_autoprune.flags import name_flag
from vllm_autoprune.serving.history import NO_CORE_FIX, History
from vllm_autoprune.serving.request_rules import (
    DEFAULT_RULES,
    LEVELS,
    REQUESTS_FLAG,
    DetailBudgets,
    RequestRules,
)
from vllm_autoprune.text_tower import TextTower, read_text_tower
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, BudgetCall
from vllm_autoprune.tpdsl.cells import Cells
from vllm_autoprune.tpdsl.cost import DEFAULT_COST
from vllm_autoprune.tpdsl.loading import load_state, suggest_name
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import POSITIONS, Positions
from vllm_autoprune.tpdsl.tower import Tower

CELLS_FLAG = "--autoprune-cells"
CUT_FLAG = "--autoprune-tower"
DETAIL_FLAG = "--autoprune-detail"
HISTORY_FLAG = "--autoprune-history"
_STATE_FLAG = "--autoprune-state"
VIDEO_BUDGET_FLAG = "--autoprune-video-budget"
POSITIONS_FLAG = "--autoprune-positions"
RECALL_FLAG = "--autoprune-recall"
_BUDGET_FLAG = "--autoprune-budget"


def _refuse_boolean(value: object) -> object:
    """Refuse ``true``, which pydantic reads as 1; flags are texts, which rules out strict mode."""
    if isinstance(value, bool):
        raise ValueError("no number")
    return value


SETTINGS_KEY = "autoprune"
"""Key of the plugin's settings in vLLM's ``additional_config``."""

WAITING_SETTINGS = "autoprune_settings"
"""Attribute of a model config that holds settings which are not applied yet."""


class _InvalidSetting(AutopruneError, ValueError):
    """An invalid setting; a ValueError, so that pydantic collects it with the others."""


def locate(setting: str, error: AutopruneError) -> list[Problem]:
    """Problems of a state, located at a setting and the state's JSON pointer, if any.

    ``setting`` is empty for a state that is passed as an object.
    """
    problems = []
    for problem in error.problems:
        where = f"{setting}#{problem.where}" if problem.where else setting
        problems.append(Problem(where, problem.what, problem.fix))
    return problems


_RULES = re.compile(
    r"(?P<level>[a-z-]+)(?::(?P<minimum>\d{1,6})-(?P<maximum>\d{1,6}))?", re.ASCII
)


def _flag(metavar: str, text: str, default: object = None, **bounds: Any) -> Any:
    """Field of a setting that has a flag."""
    return Field(
        default, title=metavar, description=text, validate_default=True, **bounds
    )


_FIXES = {
    "feature_cache_gb": "give a size in GB from 0 to 1024",
    "recall": f"give a number of tokens from 0 to {MAX_BUDGET}",
    "request_budget": "give a number of tokens above 0",
    "request_cost": "give a number of milliseconds above 0, at most a million",
}
"""Suggested fix if the value of a setting is no number in its range."""


class Settings(BaseModel):
    """Settings of a server, each given as text by its flag or as a value from Python."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    _numbers = field_validator(*_FIXES, mode="before")(_refuse_boolean)

    state: PruningState = _flag(
        "PATH|NAME",
        "Pruning state to serve: a JSON file, or the name of one that ships with the package "
        "(such as `autoprune`). Without it the plugin is inert.",
    )
    budget: BudgetCall | None = _flag(
        "K|SHARE[:MIN-MAX]",
        "Visual tokens kept of every image, instead of the state's own budget: a number, or a "
        "share of its tokens such as 1/8, 12.5% or 1/8:64-640.",
    )
    video_budget: BudgetCall | None = _flag(
        "K|SHARE|tokens_per_frame:K",
        "Visual tokens kept of every video, by a state that prunes them (its `frames`), instead of "
        "the state's own budget: of all frames, a share of all, or so many times the frames.",
    )
    cells: Cells | None = _flag(
        "RULE",
        "Cells of a picture that are dropped before the vision tower: `flat`, those of one colour "
        "that their neighbours predict; `predicted`, all of these; `changed`, those that the image "
        "before has at the same place; `changed+flat`; `none`. Default: the state's.",
    )
    tower: Tower | None = _flag(
        "SHARE@DEPTH",
        "Cells of a picture that stay after a share of the vision tower's layers: `2/3@1/3` drops "
        "a third of them after a third of the layers; `none`. Default: the state's.",
    )
    positions: Positions | None = _flag(
        "WHERE",
        "Where kept tokens stand for the language model: `true`, where they stood in the whole "
        "image; `spread`, evenly over its span; `packed`, one after the other. Default: the "
        "state's. Under M-RoPE they stand where they stood. Images without room are packed.",
    )
    text_tower: TextTower | None = _flag(
        "PATH|HF_ID",
        "CLIP checkpoint whose text tower measures how relevant a token is to the instruction "
        "(for LLaVA-1.5: openai/clip-vit-large-patch14-336). Without it the language model's own "
        "input embeddings do.",
    )
    feature_cache_gb: float = _flag(
        "GB",
        "Bound of the per-image feature cache on each worker's device, which lets further "
        "questions on an image skip the vision tower; 0 turns it off. Default: 0.25.",
        0.25,
        ge=0,
        le=1024,
    )
    requests: RequestRules = _flag(
        "LEVEL[:MIN-MAX]",
        "What a request may set for itself: `none`; `budget`, a budget or no pruning; "
        "`shipped-states`, also a state that ships; `states`, any state. A range bounds the tokens "
        "of one image. "
        "Unless given, vLLM refuses requests that ask (see --trust-request-mm-kwargs).",
    )
    detail: DetailBudgets = _flag(
        "low=K,high=K",
        "Budget, as of --autoprune-budget, of an image whose `image_url.detail` in a request is "
        "`low` or `high`, "
        "whatever --autoprune-requests allows. Unless given, `image_url.detail` changes nothing.",
    )
    recall: int = _flag(
        "K_r",
        "Visual tokens that a later user turn without an image gets of the conversation's images, "
        "chosen by its own text among those not kept yet. Earlier turns stay in the prefix cache. "
        "Default: 0.",
        0,
        ge=0,
    )
    history: History | None = _flag(
        "M[:CORE][,every=E]",
        "Only the newest M images of a conversation keep K tokens; older ones keep their core "
        "alone, of so many tokens or such a share of K (default: the state's own core), and are "
        "retired E at a time (default: 1). Default: all keep K.",
    )
    request_budget: int | None = _flag(
        "K",
        "Most visual tokens that all images and pruned videos of a request keep: where they would "
        "keep more, these are shared among them, evenly. Default: as many as there are.",
        ge=1,
        le=10**9,
    )
    request_cost: float = _flag(
        "MS",
        "Bound on a state that a request brings: predicted milliseconds of one CPU core for one "
        "selection from an image of 576 tokens, and for as many tokens of its videos. Default: "
        "200, four times the shipped `autoprune`.",
        DEFAULT_COST,
        gt=0,
        le=10**6,
    )

    # Validators. That of a setting sees the settings declared before it, if these are valid.

    @field_validator("state", mode="plain")
    @classmethod
    def read_state(cls, value: object) -> PruningState:
        """The state from a file, a shipped name, a dictionary, or a state object."""
        if value is None:
            what = "no state is given, and the other settings mean nothing without one"
            raise _InvalidSetting.of(_STATE_FLAG, what, "give a file or a shipped name")
        if isinstance(value, PruningState):
            return value
        where = ""
        if isinstance(value, Mapping):
            try:
                text = json.dumps(value)
            except (
                TypeError,
                ValueError,
                RecursionError,
            ) as error:  # the file may hold anything
                what = f"not JSON: {str(error)[:200]}"
                fix = "give a dictionary such as json.load returns"
                raise _InvalidSetting.of(where, what, fix) from None
        else:
            text = str(value)
            where = f"{_STATE_FLAG} {text[:255]}"
        try:
            return load_state(text)
        except StateError as error:
            raise _InvalidSetting("settings", locate(where, error)) from None

    @field_validator("budget", mode="plain")
    @classmethod
    def read_budget(cls, value: object, info: ValidationInfo) -> BudgetCall | None:
        """A budget that the state can keep."""
        budget = None if value is None else BudgetCall.parse(value, _BUDGET_FLAG)
        where = "state" if budget is None else _BUDGET_FLAG
        _check_budget(where, budget, info)
        return budget

    @field_validator("video_budget", mode="plain")
    @classmethod
    def read_video_budget(
        cls, value: object, info: ValidationInfo
    ) -> BudgetCall | None:
        """The budget of videos, for a state that prunes them."""
        if value is None:
            return None
        budget = BudgetCall.parse(value, VIDEO_BUDGET_FLAG, video=True)
        _check_budget(VIDEO_BUDGET_FLAG, budget, info, video=True)
        return budget

    @field_validator("cells", "tower", mode="plain")
    @classmethod
    def read_rule(cls, value: object, info: ValidationInfo) -> Cells | Tower | None:
        """A rule for cells, before the tower or inside it; the state's own if none is set."""
        state = info.data.get("state")
        try:
            if info.field_name == "cells":
                value = state.cells if value is None and state else value
                return None if value is None else Cells.parse(value, CELLS_FLAG)
            value = state.tower if value is None and state else value
            return None if value is None else Tower.parse(value, CUT_FLAG)
        except StateError as error:
            raise _InvalidSetting("settings", error.problems) from None

    @field_validator("positions", mode="plain")
    @classmethod
    def read_positions(cls, value: object) -> Positions | None:
        """A name of positions; from Python also the boolean True, which YAML makes of ``true``."""
        word = "true" if value is True else value
        if word is None:
            return None
        for positions in POSITIONS:
            if word == positions:
                return positions
        what = f"{str(value)[:80]!r} is not known"
        fix = f"give {', '.join(POSITIONS)}"
        raise _InvalidSetting.of(POSITIONS_FLAG, what, fix)

    @field_validator("text_tower", mode="plain")
    @classmethod
    def read_tower(cls, value: object) -> TextTower | None:
        """The description of a CLIP checkpoint."""
        try:
            return None if value is None else read_text_tower(str(value))
        except ConfigError as error:
            raise _InvalidSetting("settings", error.problems) from None

    @field_validator("requests", mode="plain")
    @classmethod
    def read_rules(cls, value: object) -> RequestRules:
        """What requests may set, from text such as ``"shipped-states"`` or ``"budget:16-256"``."""
        if value is None:
            return DEFAULT_RULES
        match = _RULES.fullmatch(str(value).strip())
        name = match["level"] if match else ""
        level = next((level for level in LEVELS if level == name), None)
        if match is None or level is None:
            near = suggest_name(str(value).partition(":")[0], LEVELS)
            fix = f"{near} (with a range where wanted: budget:16-256)"
            raise _InvalidSetting.of(
                REQUESTS_FLAG, f"{str(value)[:80]!r} is not known", fix
            )
        minimum = int(match["minimum"] or 1)
        maximum = int(match["maximum"] or MAX_BUDGET)
        if not 1 <= minimum <= maximum <= MAX_BUDGET:
            what = f"{minimum}-{maximum} is no range of tokens"
            fix = f"give two numbers from 1 to {MAX_BUDGET}, in order"
            raise _InvalidSetting.of(REQUESTS_FLAG, what, fix)
        return RequestRules(level, minimum, maximum, explicit=True)

    @field_validator("detail", mode="plain")
    @classmethod
    def read_detail(cls, value: object, info: ValidationInfo) -> DetailBudgets:
        """Budgets from ``"low=64,high=256"`` or a mapping; they must fit state and rules."""
        if value is None:
            return DetailBudgets()
        detail = _parse_detail(value)
        maximum = info.data.get("requests", DEFAULT_RULES).maximum
        for level, budget in detail.as_dict().items():
            _, largest = budget.range()
            if largest > maximum:
                rule = f"{budget.rule()}"
                what = f"{level} = {rule} keeps up to {largest} tokens, and "
                what += f"{REQUESTS_FLAG} allows {maximum} at most"
                fix = "lower it"
                if ":" in rule or "/" in rule:
                    fix = f"give {rule.partition(':')[0]}:1-{maximum}"
                fix += ", or raise the range"
                raise _InvalidSetting.of(DETAIL_FLAG, what, fix)
            _check_budget(f"{DETAIL_FLAG} {level}", budget, info)
        return detail

    @field_validator("history", mode="plain")
    @classmethod
    def read_history(cls, value: object, info: ValidationInfo) -> History | None:
        """The rule for older images, whose core the state can keep."""
        if value is None:
            return None
        history = History.parse(value, HISTORY_FLAG)
        if "state" in info.data and not history.has_core(info.data["state"]):
            what = f"state {info.data['state'].name!r} has no core"
            raise _InvalidSetting.of(HISTORY_FLAG, what, NO_CORE_FIX)
        _check_budget(HISTORY_FLAG, history.core, info)
        return history

    @field_validator("recall")
    @classmethod
    def check_recall(cls, recall: int, info: ValidationInfo) -> int:
        """Check that K_r is within the range of the rules."""
        maximum = info.data.get("requests", DEFAULT_RULES).maximum
        if recall > maximum:
            what = f"K_r = {recall}, and {REQUESTS_FLAG} allows {maximum} at most"
            fix = "lower it, or raise the range"
            raise _InvalidSetting.of(RECALL_FLAG, what, fix)
        return recall

    # Declared last, because validators that read plain values run before those declared earlier.
    @field_validator("*", mode="before")
    @classmethod
    def refuse_empty(cls, value: object, info: ValidationInfo) -> object:
        """Refuse an empty text: ignoring it would serve something that nobody asked for."""
        if isinstance(value, str) and not value.strip():
            what = "is empty, as where a variable is not set"
            fix = "give a value, or leave it out"
            raise _InvalidSetting.of(_name_flag(str(info.field_name)), what, fix)
        return value

    @property
    def rules(self) -> RequestRules:
        """Permissions of requests, with all bounds on them."""
        return replace(
            self.requests,
            cost=self.request_cost,
            detail=self.detail,
            recall=self.recall,
            history=self.history,
            total=self.request_budget,
        )


def _check_budget(
    where: str,
    budget: BudgetCall | None,
    info: ValidationInfo,
    *,
    video: bool = False,
) -> None:
    """Raise unless the state, if it is valid, can keep a budget."""
    if "state" not in info.data:
        return
    try:
        materialize(info.data["state"], budget, video=video)
    except BudgetError as error:
        raise _InvalidSetting("settings", locate(where, error)) from None


def _parse_detail(value: object) -> DetailBudgets:
    """Budgets of one or both levels; ``low`` must not keep more than ``high``."""
    levels = value
    repeats = False
    if isinstance(value, str):
        parts = [entry.partition("=") for entry in value.split(",")]
        levels = {name.strip(): budget for name, _, budget in parts}
        repeats = len(levels) < len(parts)
    try:
        detail = DetailBudgets.model_validate(levels)
    except ValidationError:
        detail = DetailBudgets()
    if repeats or not detail.as_dict():
        what = f"{str(value)[:80]!r} is not one budget for low, high or both"
        fix = "give low=64,high=256, or low=1/16,high=1/4, or one of the two"
        raise _InvalidSetting.of(DETAIL_FLAG, what, fix)
    low = detail.low
    high = detail.high
    if low is not None and high is not None:
        sizes = [2**exponent for exponent in range(17)]
        if any(low.tokens_kept(size) > high.tokens_kept(size) for size in sizes):
            what = f"low = {low.rule()} can keep more than high = {high.rule()}"
            raise _InvalidSetting.of(DETAIL_FLAG, what, "give low the smaller budget")
    return detail


def read_settings(raw: object) -> tuple[Settings | None, list[Problem]]:
    """The settings, or None if any is not valid, and all their problems."""
    where = f"additional_config/{SETTINGS_KEY}"
    if not isinstance(raw, Mapping):
        return None, [Problem(where, "not an object", 'give {"state": ...}')]
    # A setting that is None in JSON or in Python counts as not set.
    values = {str(name): value for name, value in raw.items() if value is not None}
    values.pop("from_flags", None)
    try:
        return Settings.model_validate(values), []
    except ValidationError as error:
        problems: list[Problem] = []
        for detail in error.errors(include_url=False):
            cause = detail.get("ctx", {}).get("error")
            name = str(detail["loc"][0])
            if isinstance(cause, AutopruneError):
                problems += cause.problems
            elif name in _FIXES:
                what = f"{str(detail['input'])[:80]!r} is not a number in its range"
                problems.append(Problem(_name_flag(name), what, _FIXES[name]))
            else:
                fix = f"use: {', '.join(Settings.model_fields)}"
                problems.append(Problem(f"{where}/{name}", "unknown setting", fix))
        return None, problems


def _name_flag(setting: str) -> str:
    return name_flag(f"{SETTINGS_KEY}_{setting}", {})
