"""What each image of a request gets: K of N tokens, what chooses them, its placeholders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems

from vllm_autoprune.errors import Problem, RequestError, StateError
from vllm_autoprune.serving.api.request import (
    ENTRY,
    MAX_PROBLEMS,
    PruningRequest,
    SharedBudget,
    request_error,
)
from vllm_autoprune.serving.hooks import depends_on
from vllm_autoprune.serving.plan import (
    MAX_CACHED_STATES,
    NO_KEY,
    Chooser,
    ItemPlan,
    decode_state,
    encode_state,
    runs_policy,
    split_over_parts,
)
from vllm_autoprune.serving.served_state import (
    CHECKED_REQUEST_BUDGET,
    ServedState,
    make_policy,
    replace_unsafe_state,
)
from vllm_autoprune.serving.settings import REQUESTS_FLAG, Level, RequestRules
from vllm_autoprune.tpdsl.base_policy import INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, require_affordable
from vllm_autoprune.tpdsl.loading import (
    escape_unprintable,
    load_state,
    shipped_states,
    suggest_name,
)
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET, PruningPolicy, materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs
    from vllm.multimodal.processing.processor import PromptUpdateDetails

# Placeholders of an image: how many tokens, in how many tiles, before any model runs.


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Visual tokens N of an image before pruning, and the tiles of the vision tower they form."""

    tokens: int
    tiles: int = 1


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Placeholder rules of one backbone.

    ``count`` gives the token count of an image from its size and a request's processor arguments;
    ``count_largest`` that of the largest image; ``token`` is the id of the placeholder token.
    ``unsplittable`` says why an image cannot be several items of a prompt, empty where it can.
    ``resize`` gives the size to which the model's processor would shrink an image of that size to
    have at most K tokens; None where N does not follow the size closely enough. Where text stands
    between the tiles of an image, ``rest_at`` is the tile that takes what does not divide of K.
    """

    count: Callable[[BaseProcessingInfo, ImageSize, Mapping[str, object]], TokenCount]
    count_largest: Callable[[BaseProcessingInfo], TokenCount]
    token: Callable[[BaseProcessingInfo], int]
    unsplittable: str = ""
    resize: Callable[[BaseProcessingInfo, ImageSize, int], ImageSize] | None = None
    rest_at: int = 0


@depends_on("vllm.multimodal.processing.processor", "PromptUpdateDetails")
def shorten_placeholders(
    content: PromptUpdateDetails, budget: int, rest_at: int = 0
) -> PromptUpdateDetails:
    """Keep K placeholders of one image's prompt text, and all other tokens.

    Where other tokens stand between them, each run of placeholders is a tile and keeps its share of
    K, which is what the worker selects of the tile.
    """
    is_embed = (
        [True] * len(content.full)
        if content.is_embed is None
        else content.is_embed(content.full).tolist()
    )
    if sum(is_embed) <= budget:
        return content
    runs = [sum(1 for _ in run) for placeholder, run in groupby(is_embed) if placeholder]
    shares = split_over_parts(budget, runs, [1] * len(runs), rest_at % len(runs))
    unused, kept = iter(shares), []
    for placeholder, run in groupby(zip(is_embed, content.full, strict=True), key=itemgetter(0)):
        tokens = [token for _, token in run]
        kept += tokens[: next(unused)] if placeholder else tokens
    return replace(content, full=kept)


# States in requests, by name or whole: size-limited, safety-checked, cached by digest.


MAX_STATE_CHARACTERS = 1 << 16
"""Bound of a whole state as JSON; the encoded behaviour has a lower bound of its own."""


def load_request_state(
    state_field: str | Mapping[str, object], cost: float = DEFAULT_COST
) -> PruningState:
    """Load the state that a request names or holds, safety-checked for serving.

    Raises :class:`RequestError`, before the state is run where its selection is predicted to take
    more than ``cost`` milliseconds. A name is looked up among the states that ship and is never a
    path.
    """
    try:
        state = (
            _load_shipped(state_field)
            if isinstance(state_field, str)
            else _parse(_dump(state_field))
        )
        text = encode_state(state)
        require_affordable(state, cost)
        verdict = _check(text)
        if isinstance(verdict, StateError):
            raise verdict
        return verdict
    except StateError as error:
        problems = [
            Problem(f"{ENTRY}/state{p.where}", p.what, p.fix) for p in error.problems[:MAX_PROBLEMS]
        ]
        raise RequestError("request", problems) from None


def _load_shipped(name: str) -> PruningState:
    file = _shipped_files().get(name)
    if file is None:
        what = f"no state of the name {escape_unprintable(name[:80], 80)!r} ships with this server"
        raise request_error("state", what, suggest_name(name[:80], list(_shipped_files())))
    return _read_file(file)


def _dump(state: Mapping[str, object]) -> str:
    try:
        text = json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise request_error(
            "state", f"no JSON: {str(error)[:200]}", "send a state as JSON"
        ) from None
    if len(text) > MAX_STATE_CHARACTERS:
        what = f"{len(text)} characters, and a request may bring {MAX_STATE_CHARACTERS}"
        raise request_error("state", what, "a state is a few kilobytes: shorten its provenance")
    return text


@cache
def _shipped_files() -> dict[str, Path]:
    return shipped_states()


@lru_cache(maxsize=MAX_CACHED_STATES)
def _read_file(file: Path) -> PruningState:
    return load_state(file)


@lru_cache(maxsize=MAX_CACHED_STATES)
def _parse(text: str) -> PruningState:
    return load_state(text)


@lru_cache(maxsize=MAX_CACHED_STATES)
def _check(text: bytes) -> PruningState | StateError:
    """The state to serve, or the error where there is none; computed once a digest."""
    state = decode_state(text)
    try:
        return replace_unsafe_state(state, min(materialize(state).budget, CHECKED_REQUEST_BUDGET))
    except StateError as error:
        return error


# Resolution of a request: the budget K of each of its images, and what chooses their tokens.


Size = tuple[int, int]
"""Width and height of an image."""


@dataclass(frozen=True, slots=True)
class ImageChoice:
    """What one image gets: tokens kept of those it has, what chooses them, the inputs it reads.

    ``state`` is the encoded state of the request, empty for the server's own. ``identity`` is what
    determines the kept tokens beside image, K and instruction. ``core`` of the kept tokens are the
    same for every question, as ``core_identity`` chooses them; in a plan, those that stand in the
    prompt as an item of their own. ``recalled`` more are those of later turns.
    ``resized`` is the size that the image is given before it is processed; all tokens of the
    smaller image are then kept.
    """

    kept: int
    tokens: int
    keep: Chooser
    needs: frozenset[Need] = frozenset()
    state: bytes = b""
    identity: str = ""
    core: int = 0
    core_identity: str = ""
    recalled: int = 0
    resized: Size | None = None

    @property
    def keeps_all(self) -> bool:
        """True where every token is kept: the image is then what it is in stock vLLM."""
        return self.kept >= self.tokens

    @property
    def reads_instruction(self) -> bool:
        """True where two questions on this image may keep different tokens."""
        return not self.needs.isdisjoint(INSTRUCTION_NEEDS)


def resolve_choices(
    served: ServedState, request: PruningRequest, images: Sequence[TokenCount]
) -> tuple[ImageChoice, ...]:
    """Resolve the choice for each of a request's images, in order.

    Raises :class:`BudgetError` or :class:`RequestError`, which vLLM answers by 400.
    """
    _require_permission(served.rules, request)
    if (recall := request.recall or 0) > (most := served.rules.maximum):
        what = f"K_r = {recall}, and requests may recall {most} tokens at most"
        raise request_error("recall", what, f"ask for 0 to {most}")
    sizes = [image.tokens for image in images]
    if not request.enabled:
        _require_no_contradiction(request)
        for size in sizes:
            _require_in_range(served.rules, size, "enabled", "all tokens of an image")
        return tuple(ImageChoice(size, size, request.keep) for size in sizes)
    state = served.state
    if request.state is not None:
        state = load_request_state(request.state, served.rules.cost)
    budgets, details = _budgets(request, sizes), _detail_budgets(served.rules, request, len(sizes))
    return tuple(
        _resolve_image(served, request, state, image, budget, by_detail)
        for budget, by_detail, image in zip(budgets, details, images, strict=True)
    )


def _resolve_image(
    served: ServedState,
    request: PruningRequest,
    state: PruningState,
    image: TokenCount,
    budget: int | None,
    by_detail: int | None,
) -> ImageChoice:
    """The choice for one image, of the budget that the request or the image's detail gives."""
    size = image.tokens
    if budget is not None and not 1 <= budget <= MAX_BUDGET:
        what = f"K = {budget}, and the image has N = {size} tokens"
        raise request_error("budget", what, f"give 1 to {size}; {size} keeps all of them")
    if request.state is None and budget is None:
        policy = served.policy(by_detail, request.keep)
    else:
        policy = make_policy(state, by_detail if budget is None else budget, request.keep)
        field = "state" if budget is None else "budget"
        if budget is not None or by_detail is None:
            _require_in_range(served.rules, policy.at(size, image.tiles).budget, field, "K")
    kept = policy.tokens_kept(size, image.tiles)
    if kept >= size:
        return ImageChoice(size, size, request.keep)
    needs = policy.needs if runs_policy(request.keep) else frozenset()
    _require_inputs(served, needs, policy)
    encoded = b"" if request.state is None else encode_state(state)
    choice = ImageChoice(kept, size, request.keep, needs, encoded, served.selection_identity(state))
    if state.core is not None and runs_policy(request.keep):
        core = policy.at(size, image.tiles).core
        choice = replace(choice, core=core, core_identity=state.core_digest)
    return choice


def recall_needs(served: ServedState, choice: ImageChoice, recall: int) -> frozenset[Need]:
    """Optional inputs that a recall of K_r tokens reads; K of the image may read others.

    Raises :class:`RequestError` where this server does not make them.
    """
    if not runs_policy(choice.keep):
        return frozenset()
    plan = ItemPlan(recall, NO_KEY, keep=choice.keep, state=choice.state, part="recall")
    policy = served.policy_for_plan(plan)
    _require_inputs(served, policy.needs, policy)
    return policy.needs


def state_label(served: ServedState, request: PruningRequest) -> str:
    """Metric label of a request's state; a state of its own is counted as ``request``."""
    if not request.enabled:
        return "off"
    if request.state is None:
        return served.state.name
    return request.state if isinstance(request.state, str) else "request"


def _require_permission(rules: RequestRules, request: PruningRequest) -> None:
    levels: list[tuple[str, Level]] = []
    if request.budget is not None:
        levels.append(("budget", "budget"))
    if request.keep != "state":
        levels.append(("keep", "budget"))
    if not request.enabled:
        levels.append(("enabled", "budget"))
    if request.recall:
        levels.append(("recall", "budget"))
    if request.state is not None:
        levels.append(("state", "shipped-states" if isinstance(request.state, str) else "states"))
    for field, level in levels:
        if not rules.allows(level):
            what = f"this server's requests may set: {rules} ({REQUESTS_FLAG})"
            raise request_error(field, what, f"leave it out, or serve with {REQUESTS_FLAG} {level}")


def _require_no_contradiction(request: PruningRequest) -> None:
    """Raise where a request wants no pruning and says how to prune."""
    fields = {"budget": request.budget, "state": request.state}
    names = [name for name, value in fields.items() if value is not None]
    names += ["keep"] if request.keep != "state" else []
    if names:
        what = f"false keeps every token, but {', '.join(map(repr, names))} is given as well"
        raise request_error("enabled", what, f"leave out 'enabled' or {names[0]!r}")


def _require_in_range(rules: RequestRules, budget: int, field: str, name: str) -> None:
    if not rules.contains(budget):
        what = f"{name} = {budget}, and requests may ask for {rules.minimum} to {rules.maximum}"
        raise request_error(field, what, "ask for a number in the range")


def _budgets(request: PruningRequest, sizes: Sequence[int]) -> Sequence[int | None]:
    """Requested budget of each image; None for the state's own."""
    budget = request.budget
    if isinstance(budget, SharedBudget):
        if budget.shared < len(sizes):
            what = f"{budget.shared} tokens for {len(sizes)} images"
            raise request_error("budget/shared", what, "give at least one token an image")
        return split_shared_budget(budget.shared, sizes)
    if isinstance(budget, tuple):
        if len(budget) != len(sizes):
            what = f"{len(budget)} budgets for {len(sizes)} images"
            raise request_error("budget", what, "give one an image, in their order")
        return budget
    return [budget] * len(sizes)


def _detail_budgets(
    rules: RequestRules, request: PruningRequest, count: int
) -> Sequence[int | None]:
    """The operator's budget for the detail of each image; None for the state's own.

    Start-up has checked these budgets against the range of the rules.
    """
    details = request.details
    if details is None or len(details) != count:
        # No messages, or messages of a form in which the images were not found.
        return [None] * count
    return [rules.detail.budget(detail) for detail in details]


def _require_inputs(served: ServedState, needs: frozenset[Need], policy: PruningPolicy) -> None:
    missing = needs - served.needs
    if not missing:
        return
    reasons = dict(served.unavailable)
    inputs = "; ".join(f"{need!r} ({reasons.get(need, 'not set up')})" for need in sorted(missing))
    what = f"its base policy {policy.base.name!r} or its atoms read what is not made here: {inputs}"
    raise request_error("state", what, "bring a state that does not read it")


def split_shared_budget(total: int, sizes: Sequence[int]) -> list[int]:
    """Split ``total`` tokens evenly over images of these sizes, the first taking the remainder.

    What an image is too small to use goes to the others, evenly again. The budgets add up to
    ``total``, or to all the tokens there are where that is less.
    """
    total = min(total, sum(sizes))
    remaining, level = total, 0
    for i, size in enumerate(sorted(sizes)):
        level = remaining // (len(sizes) - i)
        if size > level:
            break
        remaining -= size
    budgets = [min(size, level) for size in sizes]
    rest = total - sum(budgets)
    for i in [i for i, size in enumerate(sizes) if size > level][:rest]:
        budgets[i] += 1
    return budgets


# The resize control: images shrunk to at most K tokens before anything else sees them.
#
# Where the number of tokens follows an image's size, the rival of pruning is a smaller image: what
# a client has by shrinking its pictures, or an operator by ``max_pixels``.


def choose_sizes(
    info: BaseProcessingInfo,
    placeholders: Placeholders,
    inputs: ProcessorInputs,
    sizes: Sequence[ImageSize | None],
    choices: Sequence[ImageChoice],
) -> tuple[ImageChoice, ...]:
    """The choices of a request, with a new size and K for each image that is to be resized.

    Raises :class:`RequestError` where the processor makes more than K tokens of any image.
    """
    resized = []
    for size, choice in zip(sizes, choices, strict=True):
        resizes = choice.keep == "resized" and not choice.keeps_all
        if not resizes or size is None or placeholders.resize is None:
            resized.append(choice)
            continue
        smaller = placeholders.resize(info, size, choice.kept)
        count = placeholders.count(info, smaller, inputs.hf_processor_mm_kwargs).tokens
        if count > choice.kept:
            what = f"K = {choice.kept}, and the image processor makes at least {count} tokens"
            fix = f"ask for {count} or more, or lower min_pixels in --mm-processor-kwargs"
            raise request_error("budget", what, fix)
        target = smaller.width, smaller.height
        # Two budgets may give one number of tokens, and then another size is another image.
        identity = f"{choice.identity}|{target}"
        resized.append(replace(choice, kept=count, resized=target, identity=identity))
    return tuple(resized)


def resize_images(
    info: BaseProcessingInfo, inputs: ProcessorInputs, sizes: Sequence[Size | None]
) -> ProcessorInputs:
    """Inputs with the images of these sizes; None leaves an image as it is."""
    if not any(sizes):
        return inputs
    items = inputs.mm_data_items["image"]
    images = [
        items.data[i] if size is None else _shrink(info, items.get(i), size)
        for i, size in enumerate(sizes)
    ]
    data = MultiModalDataItems({**inputs.mm_data_items, "image": ImageProcessorItems(images)})
    return replace(inputs, mm_data_items=data)


def _shrink(info: BaseProcessingInfo, image: object, size: Size) -> Image.Image | None:
    """The image at a size, with the processor's own interpolation; None for one sent by name."""
    if image is None:
        return None
    if not isinstance(image, Image.Image):
        what, fix = "can resize pictures, and this image is an array", "send it as a picture"
        raise request_error("keep", what, fix)
    method = Image.Resampling(int(info.get_hf_processor().image_processor.resample))
    return image.convert("RGB").resize(size, method)
