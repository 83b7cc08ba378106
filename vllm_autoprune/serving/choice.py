"""From a request to what each of its images gets: K, and which policy chooses.

Knows nothing about vLLM, pixels or words: extents of images in, choices out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_autoprune.serving.brought import brought
from vllm_autoprune.serving.carried import packed
from vllm_autoprune.serving.placeholders import Extent
from vllm_autoprune.serving.plan import Keep
from vllm_autoprune.serving.request import PruningRequest, Shared, refusal
from vllm_autoprune.serving.rules import FLAG, Level, RequestRules
from vllm_autoprune.serving.served import ServedState, policy_of
from vllm_autoprune.serving.shares import shared
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy
from vllm_autoprune.tpdsl.tokens import Need


@dataclass(frozen=True, slots=True)
class Choice:
    """One image: the tokens it keeps of those it has, who chooses, and what that reads.

    ``state`` is carried to the workers where the request brought it. ``identity`` says what
    decides beside image, K and instruction.
    """

    kept: int
    tokens: int
    keep: Keep
    needs: frozenset[Need] = frozenset()
    state: bytes = b""
    identity: str = ""

    @property
    def whole(self) -> bool:
        """True where every token is kept: the image is then what it is in stock vLLM."""
        return self.kept >= self.tokens

    @property
    def reads_instruction(self) -> bool:
        """True where two questions on this image may keep different tokens."""
        return not self.needs.isdisjoint({"instruction", "language"})


def choose_for(
    served: ServedState, request: PruningRequest, images: Sequence[Extent]
) -> tuple[Choice, ...]:
    """What a request's images get, in order.

    Raises :class:`BudgetError` or :class:`RequestError`, which vLLM answers by 400.
    """
    _permitted(served.rules, request)
    sizes = [image.tokens for image in images]
    if not request.enabled:
        for size in sizes:
            _within(served.rules, size, "enabled", "all tokens of an image")
        return tuple(Choice(size, size, request.keep) for size in sizes)
    state = served.state
    if request.policy is not None:
        state = brought(request.policy, served.rules.cost)
    choices = []
    for budget, image in zip(_budgets(request, sizes), images, strict=True):
        size = image.tokens
        if request.policy is None and budget is None:
            policy = served.policy(None, request.keep)
        else:
            policy = policy_of(state, budget, request.keep)
            field = "policy" if budget is None else "budget"
            _within(served.rules, policy.at(size, image.tiles).budget, field, "K")
        kept = policy.tokens_kept(size, image.tiles)
        if kept >= size:
            choices.append(Choice(size, size, request.keep))
            continue
        needs = policy.needs if request.keep != "random" else frozenset()
        _available(served, needs, policy)
        carried = b"" if request.policy is None else packed(state)
        identity = served.identity_of(state)
        choices.append(Choice(kept, size, request.keep, needs, carried, identity))
    return tuple(choices)


def called_by(served: ServedState, request: PruningRequest) -> str:
    """What a request's policy is counted under; a state of its own has no name worth keeping."""
    if not request.enabled:
        return "off"
    if request.policy is None:
        return served.state.name
    return request.policy if isinstance(request.policy, str) else "request"


def _permitted(rules: RequestRules, request: PruningRequest) -> None:
    asked: list[tuple[str, Level]] = []
    if request.budget is not None:
        asked.append(("budget", "budget"))
    if request.keep != "state":
        asked.append(("keep", "budget"))
    if not request.enabled:
        asked.append(("enabled", "budget"))
    if request.policy is not None:
        asked.append(("policy", "policies" if isinstance(request.policy, str) else "states"))
    for field, level in asked:
        if not rules.allows(level):
            what = f"this server's requests may set: {rules} ({FLAG})"
            raise refusal(field, what, f"leave it out, or serve with {FLAG} {level}")


def _within(rules: RequestRules, budget: int, field: str, name: str) -> None:
    if not rules.contain(budget):
        what = f"{name} = {budget}, and requests may ask for {rules.least} to {rules.most}"
        raise refusal(field, what, "ask for a number in the range")


def _budgets(request: PruningRequest, sizes: Sequence[int]) -> Sequence[int | None]:
    """The budget asked for each image; None: the state's own."""
    asked = request.budget
    if isinstance(asked, Shared):
        if asked.shared < len(sizes):
            what = f"{asked.shared} tokens for {len(sizes)} images"
            raise refusal("budget/shared", what, "give at least one token an image")
        return shared(asked.shared, sizes)
    if isinstance(asked, tuple):
        if len(asked) != len(sizes):
            what = f"{len(asked)} budgets for {len(sizes)} images"
            raise refusal("budget", what, "give one an image, in their order")
        return asked
    return [asked] * len(sizes)


def _available(served: ServedState, needs: frozenset[Need], policy: PruningPolicy) -> None:
    missing = needs - served.needs
    if not missing:
        return
    reasons = dict(served.lacks)
    told = "; ".join(f"{need!r} ({reasons.get(need, 'not set up')})" for need in sorted(missing))
    what = f"its base policy {policy.base.name!r} or its atoms read what is not made here: {told}"
    raise refusal("policy", what, "bring a state that does not read it")
