"""Settings of a server: one model, from whose fields come the flags of `vllm serve`, and checks.

A flag writes plain data into ``additional_config["autoprune"]``, the same place that
``LLM(..., additional_config={"autoprune": {...}})`` fills, so both ways are one from there on.
Whether settings fit the model is checked in :mod:`.startup`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
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
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, BudgetCall
from vllm_autoprune.tpdsl.cells import Cells
from vllm_autoprune.tpdsl.cost import DEFAULT_COST
from vllm_autoprune.tpdsl.loading import load_state, suggest_name
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import POSITIONS, Positions

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

CELLS_FLAG = "--autoprune-cells"
DETAIL_FLAG = "--autoprune-detail"
REQUESTS_FLAG = "--autoprune-requests"
TOWER_FLAG = "--autoprune-text-tower"
_STATE_FLAG = "--autoprune-state"
VIDEO_BUDGET_FLAG = "--autoprune-video-budget"
POSITIONS_FLAG = "--autoprune-positions"
_BUDGET_FLAG = "--autoprune-budget"

Detail = Literal["low", "high"]
"""Levels with a budget; with ``auto``, or no level, an image has the server's own budget."""

DETAIL_LEVELS: tuple[Detail, ...] = get_args(Detail)


def _refuse_boolean(value: object) -> object:
    """Refuse ``true``, which pydantic reads as 1; flags are texts, so strict mode is no way."""
    if isinstance(value, bool):
        raise ValueError("no number")
    return value


def _read_budget(value: object) -> BudgetCall | None:
    return None if value is None else BudgetCall.parse(value, _BUDGET_FLAG)


class _DetailBudgets(BaseModel):
    """Budget of an image whose detail is ``low`` or ``high``; None where there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    _budgets = field_validator("*", mode="plain")(_read_budget)

    low: BudgetCall | None = None
    high: BudgetCall | None = None

    def as_dict(self) -> dict[Detail, BudgetCall]:
        """Budget of every level that has one."""
        return {
            level: b for level in DETAIL_LEVELS if (b := dict(self)[level]) is not None
        }


Level = Literal["none", "budget", "shipped-states", "states"]
"""What requests may set: nothing; a budget, a control, or no pruning at all; also a state that
ships with the package; also any state. Each level allows what the ones before it do."""

LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Level of permission, and the budgets of one image that requests may ask for, ends included.

    ``explicit`` where the operator gave the flag: vLLM's own check of ``mm_processor_kwargs`` then
    lets the plugin's entry pass, which otherwise needs ``--trust-request-mm-kwargs``. ``cost``
    bounds the predicted milliseconds of a request's state
    (:mod:`vllm_autoprune.tpdsl.cost`). ``detail`` has the budgets that any request
    may choose by ``image_url.detail``, at every level; ``recall`` is the number of tokens that
    later turns of a conversation recall where their request does not say it. ``total`` bounds what
    all images and clips of a request keep, recalls aside; None without a bound.
    """

    level: Level = "budget"
    minimum: int = 1
    maximum: int = MAX_BUDGET
    explicit: bool = False
    cost: float = DEFAULT_COST
    detail: _DetailBudgets = field(default_factory=_DetailBudgets)
    recall: int = 0
    total: int | None = None

    def allows(self, level: Level) -> bool:
        """Whether requests may set the fields that a level adds."""
        return LEVELS.index(level) <= LEVELS.index(self.level)

    def __str__(self) -> str:
        if self.level == "none":
            return self.level
        return f"{self.level}:{self.minimum}-{self.maximum}"


DEFAULT_RULES = RequestRules()


# Description of a CLIP text tower: path, sign of its relevance, sizes. Loads no weights.

SIGN_KEY = "autoprune_relevance_sign"
"""Key of a CLIP ``config.json`` that states the direction; +1 or -1."""


@dataclass(frozen=True, slots=True)
class TextTower:
    """CLIP checkpoint used for relevance; ``vocabulary`` defaults to that of OpenAI's CLIP."""

    path: str
    sign: int
    reason: str
    segment: int
    width: int
    vision_width: int
    vocabulary: int = 49408


def read_text_tower(path: str) -> TextTower:
    """Read a CLIP checkpoint's description; raises ConfigError with what is wrong.

    The sign is -1 where the description says nothing: that is how OpenAI's CLIP behaves on the
    patches LLaVA uses (base policy specification of CDPruner, and its authors' own remark).
    """
    from transformers import AutoConfig, AutoTokenizer, CLIPConfig

    any_fix = "give a folder with a CLIP checkpoint (config, weights, tokenizer) or its Hub id"

    def refuse(what: str, fix: str = any_fix) -> ConfigError:
        return ConfigError("text tower", [Problem(f"{TOWER_FLAG} {path}", what, fix)])

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(config, CLIPConfig):
        raise refuse(
            f"is a {config.model_type!r} model", "give a CLIP model with both towers"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise refuse(f"has no tokenizer ({str(error).splitlines()[0]})") from None
    text = config.text_config
    ids = set(tokenizer.get_vocab().values())
    # If the files are missing, transformers creates a tokenizer without words.
    if ids <= set(tokenizer.all_special_ids):
        raise refuse("has no tokenizer (only start and end tokens were found)")
    if max(ids) >= text.vocab_size:
        known = f"its text tower knows {text.vocab_size} tokens"
        fix = "give the tokenizer that belongs to the checkpoint"
        raise refuse(f"its tokenizer makes token {max(ids)}, but {known}", fix)
    sign = config.to_dict().get(SIGN_KEY)
    reason = f"its config states {SIGN_KEY}"
    if sign is None:
        sign = -1
        reason = "its config states no direction and OpenAI's CLIP is inverted on these patches"
    elif isinstance(sign, bool) or sign not in (1, -1):
        raise refuse(f"states {SIGN_KEY} = {sign!r}", "write 1 or -1")
    return TextTower(
        path=path,
        sign=int(sign),
        reason=reason,
        segment=text.max_position_embeddings,
        width=config.projection_dim,
        vision_width=config.vision_config.hidden_size,
        vocabulary=text.vocab_size,
    )


# The settings, each with its flag, its help and its check.

SETTINGS_KEY = "autoprune"
"""Key of the plugin's settings in vLLM's ``additional_config``."""

WAITING_SETTINGS = "autoprune_settings"
"""Attribute of a model config with settings that are not applied yet."""

MIDDLEWARE = "vllm_autoprune.serving.api.request.KeepHeaders"
"""Import path of the middleware that keeps our headers, for vLLM's ``--middleware``."""


class _InvalidSetting(AutopruneError, ValueError):
    """A setting is not valid; a ValueError, which pydantic collects with those of the others."""


def _refuse(where: str, what: str, fix: str) -> _InvalidSetting:
    return _InvalidSetting("settings", [Problem(where, what, fix)])


def _locate(setting: str, error: AutopruneError) -> _InvalidSetting:
    """Problems of a state, placed in a setting, with the state's JSON pointer where they have one.

    ``setting`` is empty for a state that is given as an object.
    """
    problems = [
        Problem(f"{setting}#{p.where}" if p.where else setting, p.what, p.fix)
        for p in error.problems
    ]
    return _InvalidSetting("settings", problems)


_RULES = re.compile(
    r"(?P<level>[a-z-]+)(?::(?P<least>\d{1,6})-(?P<most>\d{1,6}))?", re.ASCII
)


def _flag(
    metavar: str, text: str, default: object = None, fix: str = "", **bounds: Any
) -> Any:
    """A setting with its flag; ``fix`` is what to do where its value is not of its type."""
    extra: dict[str, JsonValue] = {"metavar": metavar, "fix": fix}
    return Field(
        default,
        description=text,
        json_schema_extra=extra,
        validate_default=True,
        **bounds,
    )


class Settings(BaseModel):
    """Settings of a server, each given as text by its flag or as a value from Python."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    _numbers = field_validator(
        "feature_cache_gb", "recall", "request_budget", "request_cost", mode="before"
    )(_refuse_boolean)

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
        "that their neighbours predict; `predicted`, all of these; `none`. Default: the state's.",
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
        fix="give a size in GB from 0 to 1024",
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
    detail: _DetailBudgets = _flag(
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
        fix=f"give a number of tokens from 0 to {MAX_BUDGET}",
        ge=0,
    )
    request_budget: int | None = _flag(
        "K",
        "Most visual tokens that all images and pruned videos of a request keep: where they would "
        "keep more, these are shared among them, evenly. Default: as many as there are.",
        fix="give a number of tokens above 0",
        ge=1,
        le=10**9,
    )
    request_cost: float = _flag(
        "MS",
        "Bound on a state that a request brings: predicted milliseconds of one CPU core for one "
        "selection from an image of 576 tokens, and for as many tokens of its videos. Default: "
        "200, four times the shipped `autoprune`.",
        DEFAULT_COST,
        fix="give a number of milliseconds above 0, at most a million",
        gt=0,
        le=10**6,
    )

    # Checks: one of a setting sees those before it, where they are valid.

    @field_validator("state", mode="plain")
    @classmethod
    def read_state(cls, value: object) -> PruningState:
        """The state of a file, a shipped name, a dictionary, or a state object."""
        if value is None:
            what = "no state is given, and the other settings mean nothing without one"
            raise _refuse(_STATE_FLAG, what, "give a file or a shipped name")
        if isinstance(value, PruningState):
            return value
        where = (
            "" if isinstance(value, Mapping) else f"{_STATE_FLAG} {str(value)[:255]}"
        )
        try:
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
        except (
            TypeError,
            ValueError,
            RecursionError,
        ) as error:  # a dictionary holds anything
            fix = "give a dictionary such as json.load returns"
            raise _refuse(where, f"not JSON: {str(error)[:200]}", fix) from None
        try:
            return load_state(text)
        except StateError as error:
            raise _locate(where, error) from None

    @field_validator("budget", mode="plain")
    @classmethod
    def read_budget(cls, value: object, info: ValidationInfo) -> BudgetCall | None:
        """A budget that the state can keep."""
        budget = _read_budget(value)
        if "state" in info.data:
            try:
                materialize(info.data["state"], budget)
            except BudgetError as error:
                raise _locate(
                    "state" if budget is None else _BUDGET_FLAG, error
                ) from None
        return budget

    @field_validator("video_budget", mode="plain")
    @classmethod
    def read_video_budget(
        cls, value: object, info: ValidationInfo
    ) -> BudgetCall | None:
        """The budget of clips, for a state that prunes them."""
        budget = (
            None
            if value is None
            else BudgetCall.parse(value, VIDEO_BUDGET_FLAG, clip=True)
        )
        if budget is not None and "state" in info.data:
            try:
                materialize(info.data["state"], budget, video=True)
            except BudgetError as error:
                raise _locate(VIDEO_BUDGET_FLAG, error) from None
        return budget

    @field_validator("cells", mode="plain")
    @classmethod
    def read_cells(cls, value: object, info: ValidationInfo) -> Cells | None:
        """The rule for cells; the state's own where none is given."""
        if value is None:
            return info.data["state"].cells if "state" in info.data else None
        try:
            return Cells.parse(value, CELLS_FLAG)
        except StateError as error:
            raise _InvalidSetting("settings", error.problems) from None

    @field_validator("positions", mode="plain")
    @classmethod
    def read_positions(cls, value: object) -> Positions | None:
        """One of the words; in Python also the boolean that ``true`` looks like."""
        word = "true" if value is True else value
        for known in POSITIONS:
            if word == known:
                return known
        if word is None:
            return None
        what = f"{str(value)[:80]!r} is not known"
        fix = f"give {', '.join(POSITIONS)}"
        raise _refuse(POSITIONS_FLAG, what, fix)

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
        """What requests may set, such as ``"shipped-states"`` or ``"budget:16-256"``."""
        if value is None:
            return DEFAULT_RULES
        match = _RULES.fullmatch(str(value).strip())
        level = next(
            (name for name in LEVELS if match and name == match["level"]), None
        )
        if match is None or level is None:
            near = suggest_name(str(value).partition(":")[0], LEVELS)
            fix = f"{near} (with a range where wanted: budget:16-256)"
            raise _refuse(REQUESTS_FLAG, f"{str(value)[:80]!r} is not known", fix)
        least = int(match["least"] or 1)
        most = int(match["most"] or MAX_BUDGET)
        if not 1 <= least <= most <= MAX_BUDGET:
            fix = f"give two numbers from 1 to {MAX_BUDGET}, in order"
            raise _refuse(REQUESTS_FLAG, f"{least}-{most} is no range of tokens", fix)
        return RequestRules(level, least, most, explicit=True)

    @field_validator("detail", mode="plain")
    @classmethod
    def read_detail(cls, value: object, info: ValidationInfo) -> _DetailBudgets:  # noqa: C901
        """Budgets by ``"low=64,high=256"``, or a mapping: possible with the state and the rules."""
        if value is None:
            return _DetailBudgets()
        levels = value
        repeats = False
        if isinstance(value, str):
            parts = [entry.partition("=") for entry in value.split(",")]
            levels = {name.strip(): budget for name, _, budget in parts}
            repeats = len(levels) < len(parts)
        try:
            detail = _DetailBudgets.model_validate(levels)
        except ValidationError:
            detail = _DetailBudgets()
        budgets = detail.as_dict()
        if repeats or not budgets:
            what = f"{str(value)[:80]!r} is not one budget for low, high or both"
            fix = "give low=64,high=256, or low=1/16,high=1/4, or one of the two"
            raise _refuse(DETAIL_FLAG, what, fix)
        if detail.low and detail.high:
            low, high = (
                [b.tokens_kept(2**i) for i in range(17)] for b in budgets.values()
            )
            if any(few > many for few, many in zip(low, high, strict=True)):
                what = f"low = {detail.low.rule()} can keep more than high = {detail.high.rule()}"
                raise _refuse(DETAIL_FLAG, what, "give low the smaller budget")
        most = info.data.get("requests", DEFAULT_RULES).maximum
        for level, budget in budgets.items():
            if (largest := budget.range()[1]) > most:
                what = f"{level} = {budget.rule()} keeps up to {largest} tokens, and "
                what += f"{REQUESTS_FLAG} allows {most} at most"
                share, *bounds = f"{budget.rule()}".split(":")
                lower = (
                    f"give {share}:1-{most}" if bounds or "/" in share else "lower it"
                )
                fix = f"{lower}, or raise the range"
                raise _refuse(DETAIL_FLAG, what, fix)
            if "state" in info.data:
                try:
                    materialize(info.data["state"], budget)
                except BudgetError as error:
                    raise _locate(f"{DETAIL_FLAG} {level}", error) from None
        return detail

    @field_validator("recall")
    @classmethod
    def check_recall(cls, recall: int, info: ValidationInfo) -> int:
        """K_r within the range of the rules."""
        most = info.data.get("requests", DEFAULT_RULES).maximum
        if recall > most:
            what = f"K_r = {recall}, and {REQUESTS_FLAG} allows {most} at most"
            raise _refuse("--autoprune-recall", what, "lower it, or raise the range")
        return recall

    # After the others: those that read plain values replace what is declared before them.
    @field_validator("*", mode="before")
    @classmethod
    def refuse_empty(cls, value: object, info: ValidationInfo) -> object:
        """Any value but an empty text: ignored, it would serve what the operator did not mean."""
        if isinstance(value, str) and not value.strip():
            what = "is empty, as where a variable is not set"
            raise _refuse(
                _flag_name(str(info.field_name)), what, "give a value, or leave it out"
            )
        return value

    @property
    def rules(self) -> RequestRules:
        """Permissions of requests, with all that bounds them."""
        return replace(
            self.requests,
            cost=self.request_cost,
            detail=self.detail,
            recall=self.recall,
            total=self.request_budget,
        )


def read_settings(settings: object) -> tuple[Settings | None, list[Problem]]:
    """The settings, None where any is not valid, and all their problems."""
    where = f"additional_config/{SETTINGS_KEY}"
    if not isinstance(settings, Mapping):
        return None, [Problem(where, "not an object", 'give {"state": ...}')]
    # A setting that is None in JSON or in Python is as if it was not given.
    items = (
        (str(name), value) for name, value in settings.items() if value is not None
    )
    try:
        return Settings.model_validate(
            {n: v for n, v in items if n != "from_flags"}
        ), []
    except ValidationError as error:
        problems: list[Problem] = []
        for detail in error.errors(include_url=False):
            cause = detail.get("ctx", {}).get("error")
            name = str(detail["loc"][0])
            if isinstance(cause, AutopruneError):
                problems += cause.problems
            elif name in Settings.model_fields:
                what = f"{str(detail['input'])[:80]!r} is not a number in its range"
                fix = _read_extra(name, "fix")
                problems.append(Problem(_flag_name(name), what, fix))
            else:
                fix = f"use: {', '.join(Settings.model_fields)}"
                problems.append(Problem(f"{where}/{name}", "unknown setting", fix))
        return None, problems


def _flag_name(setting: str) -> str:
    return f"--autoprune-{setting.replace('_', '-')}"


def _read_extra(setting: str, key: str) -> str:
    extra = Settings.model_fields[setting].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra[key])


# Flags of `vllm serve`, in a group of their own; values are checked where the model is known.


class _Merge(argparse.Action):
    """Add a flag's raw text, or what ``--additional-config`` says, to ``additional_config``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        extra = values
        if self.dest != "additional_config":
            key = self.dest.removeprefix("autoprune_")
            extra = {SETTINGS_KEY: {key: values, "from_flags": True}}
        if not isinstance(extra, Mapping):
            raise argparse.ArgumentError(self, f"not a JSON object: {extra!r}")
        # The default dict belongs to the parser and is shared between parses: never changed here.
        merged = dict(vars(namespace).get("additional_config") or {})
        for key, value in extra.items():
            before = merged.get(key)
            if (
                key == SETTINGS_KEY
                and isinstance(value, Mapping)
                and isinstance(before, Mapping)
            ):
                value = {**before, **value}
            merged[key] = value
        namespace.additional_config = merged
        added = vars(namespace).get("middleware")  # parsers without a server have none
        if SETTINGS_KEY in merged and added is not None and MIDDLEWARE not in added:
            namespace.middleware = [*added, MIDDLEWARE]


def add_flags(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add the plugin's flags to vLLM's parser.

    Its ``--additional-config`` then adds to what the flags set, in either order.
    """
    group = parser.add_argument_group(
        "AutoPrune", "Keep K of N visual tokens before prefill (vllm-autoprune)."
    )
    for name, setting in Settings.model_fields.items():
        group.add_argument(
            _flag_name(name),
            action=_Merge,
            dest=f"autoprune_{name}",
            default=argparse.SUPPRESS,
            metavar=_read_extra(name, "metavar"),
            help=(setting.description or "").replace("%", "%%"),
        )
    for action in parser._actions:
        if "--additional-config" in action.option_strings:
            action.__class__ = _Merge
    return parser
