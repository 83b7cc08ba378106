"""Settings of a server: the flags of `vllm serve`, their values, and their checks one by one.

A flag writes plain data into ``additional_config["autoprune"]``, the same place that
``LLM(..., additional_config={"autoprune": {...}})`` fills, so both ways are one from there on.
Whether settings fit the model, and each other, is checked in :mod:`.startup`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from vllm_autoprune.errors import BudgetError, ConfigError, Problem, StateError
from vllm_autoprune.tpdsl.cost import DEFAULT_COST
from vllm_autoprune.tpdsl.cost import FLAG as COST_FLAG
from vllm_autoprune.tpdsl.loading import load_state, suggest_name
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET, materialize
from vllm_autoprune.tpdsl.state import PruningState

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

# Budgets for levels of ``image_url.detail``: the parsed value of ``--autoprune-detail``.


DETAIL_FLAG = "--autoprune-detail"

Detail = Literal["low", "high"]
"""Levels with a budget; with ``auto``, or no level, an image has the server's own budget."""

DETAIL_LEVELS: tuple[Detail, ...] = get_args(Detail)


@dataclass(frozen=True, slots=True)
class DetailBudgets:
    """K of an image whose detail is ``low`` or ``high``; None where the operator gives no K."""

    low: int | None = None
    high: int | None = None

    def budget(self, detail: Detail | None) -> int | None:
        """K of an image with this detail; None for the server's own budget."""
        return None if detail is None else self.as_dict().get(detail)

    def as_dict(self) -> dict[Detail, int]:
        """K of every level that has one."""
        pairs: tuple[tuple[Detail, int | None], ...] = (("low", self.low), ("high", self.high))
        return {level: budget for level, budget in pairs if budget is not None}

    @property
    def largest(self) -> int:
        """The largest K of any level; 0 if there is none."""
        return max(self.as_dict().values(), default=0)


NO_DETAIL_BUDGETS = DetailBudgets()


def parse_detail_budgets(value: object, problems: list[Problem]) -> DetailBudgets:
    """Parse a setting's value: ``"low=64,high=256"``, or a mapping with the same content.

    Appends to ``problems`` what is malformed; levels with a problem get no budget.
    """
    if value is None:
        return NO_DETAIL_BUDGETS
    pairs = list(value.items()) if isinstance(value, Mapping) else _split_levels(str(value))
    budgets: dict[Detail, int] = {}
    for name, given in pairs:
        level = next((level for level in DETAIL_LEVELS if level == name), None)
        if level is None:
            what = f"{str(name)[:80]!r} is no level of detail with a budget"
            problems.append(Problem(DETAIL_FLAG, what, "give low=64,high=256, or one of the two"))
        elif level in budgets:
            problems.append(Problem(DETAIL_FLAG, f"{level} is given twice", "give it once"))
        elif (budget := _parse_level(given)) is None:
            what = f"{level} = {str(given)[:80]!r} is not a number of tokens"
            problems.append(Problem(DETAIL_FLAG, what, f"give 1 or more, such as {level}=64"))
        else:
            budgets[level] = budget
    if not pairs:
        problems.append(Problem(DETAIL_FLAG, "gives no budget", "give low=64,high=256"))
    result = DetailBudgets(**budgets)
    if result.low is not None and result.high is not None and result.low > result.high:
        what = f"low = {result.low} keeps more tokens than high = {result.high}"
        problems.append(Problem(DETAIL_FLAG, what, "give low the smaller budget"))
    return result


def _split_levels(text: str) -> list[tuple[str, str]]:
    parts = (entry.partition("=") for entry in text.split(","))
    return [(name.strip(), given.strip()) for name, _, given in parts]


def _parse_level(given: object) -> int | None:
    try:
        budget = int(str(given))
    except ValueError:
        return None
    return budget if budget >= 1 else None


# Permissions of requests: the parsed value of ``--autoprune-requests``.


REQUESTS_FLAG = "--autoprune-requests"

Level = Literal["none", "budget", "shipped-states", "states"]
"""What requests may set: nothing; a budget, a control, or no pruning at all; also a state that
ships with the package; also any state. Each level allows what the ones before it do."""

LEVELS: tuple[Level, ...] = get_args(Level)

_FORM = re.compile(r"(?P<level>[a-z-]+)(?::(?P<least>\d{1,6})-(?P<most>\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Level of permission, and the budgets of one image that requests may ask for, ends included.

    ``explicit`` where the operator gave the flag: vLLM's own check of ``mm_processor_kwargs`` then
    lets the plugin's entry pass, which otherwise needs ``--trust-request-mm-kwargs``. ``cost``
    bounds the predicted milliseconds of a request's state
    (:mod:`vllm_autoprune.tpdsl.cost`). ``detail`` has the budgets that any request
    may choose by ``image_url.detail``, at every level; ``recall`` is the number of tokens that
    later turns of a conversation recall where their request does not say it.
    """

    level: Level = "budget"
    minimum: int = 1
    maximum: int = MAX_BUDGET
    explicit: bool = False
    cost: float = DEFAULT_COST
    detail: DetailBudgets = NO_DETAIL_BUDGETS
    recall: int = 0

    def allows(self, level: Level) -> bool:
        """Whether requests may set the fields that a level adds."""
        return LEVELS.index(level) <= LEVELS.index(self.level)

    def contains(self, budget: int) -> bool:
        """Whether requests may ask for so many tokens of an image."""
        return self.minimum <= budget <= self.maximum

    def for_processed_inputs(self) -> RequestRules:
        """The rules of inputs that a client processed: without the flag they may set nothing.

        They do not pass vLLM's check of ``mm_processor_kwargs``, which protects such a server.
        """
        return self if self.explicit else replace(self, level="none")

    def __str__(self) -> str:
        if self.level == "none":
            return self.level
        return f"{self.level}:{self.minimum}-{self.maximum}"


DEFAULT_RULES = RequestRules()


def parse_rules(value: object, problems: list[Problem]) -> RequestRules:
    """Parse a setting's value, such as ``"shipped-states"`` or ``"budget:16-256"``.

    Appends to ``problems`` where the value is malformed.
    """
    if value is None:
        return DEFAULT_RULES
    match = _FORM.fullmatch(str(value).strip())
    level = next((name for name in LEVELS if match and name == match["level"]), None)
    if match is None or level is None:
        what = f"{str(value)[:80]!r} is not known"
        near = suggest_name(str(value).partition(":")[0], LEVELS)
        fix = f"{near} (with a range where wanted: budget:16-256)"
        problems.append(Problem(REQUESTS_FLAG, what, fix))
        return RequestRules("none", explicit=True)
    least, most = int(match["least"] or 1), int(match["most"] or MAX_BUDGET)
    if not 1 <= least <= most <= MAX_BUDGET:
        what = f"{least}-{most} is no range of tokens"
        problems.append(
            Problem(REQUESTS_FLAG, what, f"give two numbers from 1 to {MAX_BUDGET}, in order")
        )
    return RequestRules(level, least, most, explicit=True)


# Description of a CLIP text tower: path, sign of its relevance, sizes. Loads no weights.


SIGN_KEY = "autoprune_relevance_sign"
"""Key of a CLIP ``config.json`` that states the direction; +1 or -1."""

TOWER_FLAG = "--autoprune-text-tower"


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

    def refuse(what: str, fix: str) -> ConfigError:
        return ConfigError("text tower", [Problem(f"{TOWER_FLAG} {path}", what, fix)])

    fix = "give a folder with a CLIP checkpoint (config, weights, tokenizer) or its Hub id"
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise refuse("holds no config.json", fix)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read ({str(error).splitlines()[0]})", fix) from None
    if not isinstance(config, CLIPConfig):
        raise refuse(f"is a {config.model_type!r} model", "give a CLIP model with both towers")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise refuse(f"has no tokenizer ({str(error).splitlines()[0]})", fix) from None
    known = set(tokenizer.get_vocab().values())
    # If the files are missing, transformers creates a tokenizer without words.
    if known <= set(tokenizer.all_special_ids):
        raise refuse("has no tokenizer (only start and end tokens were found)", fix)
    if max(known) >= config.text_config.vocab_size:
        size = config.text_config.vocab_size
        what = f"its tokenizer makes token {max(known)}, but its text tower knows {size} tokens"
        raise refuse(what, "give the tokenizer that belongs to the checkpoint")
    stated = config.to_dict().get(SIGN_KEY)
    if stated is not None and (isinstance(stated, bool) or stated not in (1, -1)):
        raise refuse(f"states {SIGN_KEY} = {stated!r}", "write 1 or -1")
    return TextTower(
        path=path,
        sign=-1 if stated is None else int(stated),
        reason=(
            "its config states no direction and OpenAI's CLIP is inverted on these patches"
            if stated is None
            else f"its config states {SIGN_KEY}"
        ),
        segment=config.text_config.max_position_embeddings,
        width=config.projection_dim,
        vision_width=config.vision_config.hidden_size,
        vocabulary=config.text_config.vocab_size,
    )


# Parsers of single settings: each returns a value or appends problems with place and fix.


SETTINGS = (
    "state",
    "budget",
    "text_tower",
    "feature_cache_gb",
    "requests",
    "detail",
    "recall",
    "request_cost",
)
DEFAULT_CACHE_GB = 0.25
MAX_COST = 1e6


def read_state(value: object, problems: list[Problem]) -> PruningState | None:
    """The state of a file, a shipped name, a dictionary, or a state object."""
    if value is None:
        what = "no state is given, and the other settings mean nothing without one"
        problems.append(Problem("--autoprune-state", what, "give a file or a shipped name"))
        return None
    if isinstance(value, PruningState):
        return value
    try:
        return load_state(_as_json(value) if isinstance(value, Mapping) else str(value))
    except StateError as error:
        for p in error.problems:
            where = (
                f"--autoprune-state {str(value)[:255]}" if not isinstance(value, Mapping) else ""
            )
            problems.append(Problem(_locate(where, p), p.what, p.fix))
        return None


def _locate(setting: str, problem: Problem) -> str:
    """The setting that a problem is in, with the problem's JSON pointer where it has one."""
    return f"{setting}#{problem.where}" if problem.where else setting


def _as_json(value: Mapping[object, object]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:  # a dictionary holds anything
        what = f"not JSON: {str(error)[:200]}"
        fix = "give a dictionary such as json.load returns"
        raise StateError("state", [Problem("", what, fix)]) from None


def read_budget(value: object, state: PruningState | None, problems: list[Problem]) -> int | None:
    """K of the setting, or of the state where there is none; None where it is invalid."""
    flag, budget = "--autoprune-budget", None
    if value is not None:
        try:
            budget = int(str(value))
        except ValueError:
            what = f"{value!r} is not a whole number"
            problems.append(Problem(flag, what, "give the number of tokens to keep, such as 64"))
            return None
    if state is None:
        if budget is not None and budget < 1:
            what = f"K = {budget} is not a number of tokens"
            problems.append(Problem(flag, what, "give 1 or more"))
        return None
    try:
        return materialize(state, budget).budget
    except BudgetError as error:
        problems += [
            Problem(_locate(flag if budget is not None else "state", p), p.what, p.fix)
            for p in error.problems
        ]
        return None


def read_detail_budgets(
    value: object, state: PruningState | None, rules: RequestRules, problems: list[Problem]
) -> DetailBudgets:
    """Budgets for ``image_url.detail``, each possible with the state and allowed by the rules."""
    budgets = parse_detail_budgets(value, problems)
    for level, budget in budgets.as_dict().items():
        if budget > rules.maximum:
            what = f"{level} = {budget}, and {REQUESTS_FLAG} allows {rules.maximum} at most"
            problems.append(Problem(DETAIL_FLAG, what, "lower the budget, or raise the range"))
            continue
        try:
            if state is not None:
                materialize(state, budget)
        except BudgetError as error:
            problems += [
                Problem(_locate(f"{DETAIL_FLAG} {level}", p), p.what, p.fix) for p in error.problems
            ]
    return budgets


def read_recall(value: object, rules: RequestRules, problems: list[Problem]) -> int:
    """Tokens of a conversation's images that each later turn without an image recalls."""
    text = str(value).strip()
    if value is None:
        return 0
    if not text.isdecimal() or int(text) > min(rules.maximum, MAX_BUDGET):
        what = f"{text[:80]!r} is not a number of tokens that requests may keep"
        fix = f"give 0 to {min(rules.maximum, MAX_BUDGET)}"
        problems.append(Problem("--autoprune-recall", what, fix))
        return 0
    return int(text)


def read_request_cost(value: object, problems: list[Problem]) -> float:
    """Predicted milliseconds that one selection by a state of a request may take."""
    try:
        cost = DEFAULT_COST if value is None else float(str(value))
    except ValueError:
        cost = -1.0
    if not 0 < cost <= MAX_COST:
        what = f"{value!r} is not a number of milliseconds"
        problems.append(Problem(COST_FLAG, what, f"give a number above 0, at most {MAX_COST:.0f}"))
        return DEFAULT_COST
    return cost


def read_tower(value: object, problems: list[Problem]) -> TextTower | None:
    """Description of a text tower's checkpoint."""
    if value is None:
        return None
    try:
        return read_text_tower(str(value))
    except ConfigError as error:
        problems += error.problems
        return None


def read_cache_bytes(value: object, problems: list[Problem]) -> int:
    """Bytes of the feature cache on each worker."""
    try:
        size = DEFAULT_CACHE_GB if value is None else float(str(value))
    except ValueError:
        size = -1.0
    if not 0 <= size <= 1024:
        what = f"{value!r} is not a size in GB"
        fix = "give a number from 0 to 1024"
        problems.append(Problem("--autoprune-feature-cache-gb", what, fix))
        return 0
    return int(size * (1 << 30))


# Flags of `vllm serve`, in a group of their own; values are checked where the model is known.


SETTINGS_KEY = "autoprune"
"""Key of the plugin's settings in vLLM's ``additional_config``."""

MIDDLEWARE = "vllm_autoprune.serving.api.request.KeepRequest"
"""Import path of the middleware that keeps our headers, for vLLM's ``--middleware``."""

_FLAGS: tuple[tuple[str, str, str], ...] = (
    (
        "state",
        "PATH|NAME",
        "Pruning state to serve: a JSON file, or the name of one that ships with the package "
        "(such as `autoprune`). Without it the plugin is inert.",
    ),
    (
        "budget",
        "K",
        "Visual tokens kept of every image, instead of the state's own budget.",
    ),
    (
        "text-tower",
        "PATH|HF_ID",
        "CLIP checkpoint whose text tower measures how relevant a token is to the instruction "
        "(for LLaVA-1.5: openai/clip-vit-large-patch14-336). Without it the language model's own "
        "input embeddings do.",
    ),
    (
        "feature-cache-gb",
        "GB",
        "Bound of the per-image feature cache on each worker's device, which lets further "
        "questions on an image skip the vision tower; 0 turns it off. Default: 0.25.",
    ),
    (
        "requests",
        "LEVEL[:MIN-MAX]",
        "What a request may set for itself: `none`; `budget`, a budget or no pruning; "
        "`shipped-states`, also a state that ships; `states`, any state. A range bounds the tokens "
        "of one image. "
        "Unless given, vLLM refuses requests that ask (see --trust-request-mm-kwargs).",
    ),
    (
        "detail",
        "low=K,high=K",
        "Visual tokens kept of an image whose `image_url.detail` in a request is `low` or `high`, "
        "whatever --autoprune-requests allows. Unless given, `image_url.detail` changes nothing.",
    ),
    (
        "recall",
        "K_r",
        "Visual tokens that a later user turn without an image gets of the conversation's images, "
        "chosen by its own text among those not kept yet. Earlier turns stay in the prefix cache. "
        "Default: 0.",
    ),
    (
        "request-cost",
        "MS",
        "Bound on a state that a request brings: predicted milliseconds of one CPU core for one "
        "selection from an image of 576 tokens. Default: 200, six times the shipped `autoprune`.",
    ),
)


class _Setting(argparse.Action):
    """Store a flag's raw text under its name in ``additional_config``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        key = self.dest.removeprefix("autoprune_")
        _merge(namespace, {SETTINGS_KEY: {key: values, "from_flags": True}})


def _merge(namespace: argparse.Namespace, extra: Mapping[str, object]) -> None:
    # The default dict belongs to the parser and is shared between parses: never changed here.
    merged = dict(vars(namespace).get("additional_config") or {})
    for key, value in extra.items():
        before = merged.get(key)
        if key == SETTINGS_KEY and isinstance(value, Mapping) and isinstance(before, Mapping):
            value = {**before, **value}
        merged[key] = value
    namespace.additional_config = merged
    added = vars(namespace).get("middleware")  # parsers without a server have none
    if SETTINGS_KEY in merged and added is not None and MIDDLEWARE not in added:
        namespace.middleware = [*added, MIDDLEWARE]


def _merging(action: argparse.Action) -> None:
    """Let `--additional-config` add to what the plugin's flags set, in either order."""
    stock = type(action)

    class Merging(stock):  # type: ignore[misc, valid-type]
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[object] | None,
            option_string: str | None = None,
        ) -> None:
            before = vars(namespace).get("additional_config")
            super().__call__(parser, namespace, values, option_string)
            parsed = namespace.additional_config
            if not isinstance(parsed, Mapping):
                raise argparse.ArgumentError(self, f"not a JSON object: {parsed!r}")
            namespace.additional_config = before
            _merge(namespace, parsed)

    action.__class__ = Merging


def wrap_add_cli_args(
    add_cli_args: Callable[..., FlexibleArgumentParser],
) -> Callable[..., FlexibleArgumentParser]:
    """Wrap ``EngineArgs.add_cli_args`` so that it adds the plugin's flags."""

    def add_with_flags(
        parser: FlexibleArgumentParser, *args: object, **kwargs: object
    ) -> FlexibleArgumentParser:
        parser = add_cli_args(parser, *args, **kwargs)
        group = parser.add_argument_group(
            "AutoPrune", "Keep K of N visual tokens before prefill (vllm-autoprune)."
        )
        for name, metavar, text in _FLAGS:
            group.add_argument(
                f"--autoprune-{name}",
                action=_Setting,
                dest=f"autoprune_{name.replace('-', '_')}",
                default=argparse.SUPPRESS,
                metavar=metavar,
                help=text,
            )
        for action in parser._actions:
            if "--additional-config" in action.option_strings:
                _merging(action)
        return parser

    return add_with_flags
