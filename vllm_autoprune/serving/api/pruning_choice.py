"""Resolution of a request: the budget K of each of its images, and what chooses their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_autoprune.serving.api.request_fields import PruningRequest, SharedBudget, request_error
from vllm_autoprune.serving.api.request_state import load_request_state
from vllm_autoprune.serving.shared.placeholders import TokenCount
from vllm_autoprune.serving.shared.plan import NO_KEY, Chooser, ItemPlan, runs_policy
from vllm_autoprune.serving.shared.request_rules import FLAG, Level, RequestRules
from vllm_autoprune.serving.shared.served_state import ServedState, make_policy
from vllm_autoprune.serving.shared.state_codec import encode_state
from vllm_autoprune.tpdsl.base_policy import INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET, PruningPolicy
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need

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
            what = f"this server's requests may set: {rules} ({FLAG})"
            raise request_error(field, what, f"leave it out, or serve with {FLAG} {level}")


def _require_no_contradiction(request: PruningRequest) -> None:
    """Raise where a request wants no pruning and says how to prune."""
    fields = {"budget": request.budget, "state": request.state}
    given = [name for name, value in fields.items() if value is not None]
    given += ["keep"] if request.keep != "state" else []
    if given:
        what = f"false keeps every token, but {', '.join(map(repr, given))} is given as well"
        raise request_error("enabled", what, f"leave out 'enabled' or {given[0]!r}")


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
    left, level = total, 0
    for i, size in enumerate(sorted(sizes)):
        level = left // (len(sizes) - i)
        if size > level:
            break
        left -= size
    budgets = [min(size, level) for size in sizes]
    rest = total - sum(budgets)
    for i in [i for i, size in enumerate(sizes) if size > level][:rest]:
        budgets[i] += 1
    return budgets
