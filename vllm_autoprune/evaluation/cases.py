"""Cases of an evaluation: all tokens, controls, and states with their base policies alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial

from pydantic import JsonValue

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.evaluation.journal import FEWER_FRAMES, RESIZED, Arm, Case
from vllm_autoprune.evaluation.scoring_request import pruning_options
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.cells import Cells
from vllm_autoprune.tpdsl.frames import Frames
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState

FULL = Case(name="full", arm="full", label="full", pruning={"enabled": False})
"""The unpruned model, which every other case is compared with."""

_SOURCE = "autoprune"
"""The shipped state whose exchange is applied to every base policy."""


def _prune_case(
    frames: int,
    arm: Arm,
    label: str,
    state: PruningState,
    budget: int | str,
    base: str = "",
    named: int = 0,
) -> Case:
    """A case that sends ``state`` in every request; refused if the state cannot have the budget.

    A state without rules for frames keeps the same number of tokens of each frame of a video.
    """
    refused = ""
    field = "budget"
    if frames:
        field = "video_budget"
        state = state.model_copy(update={"frames": state.frames or Frames()})
    try:
        call = BudgetCall.parse(budget, video=frames > 0)
        materialize(state, call, video=frames > 0)
    except AutopruneError as error:
        refused = str(error)
    return Case(
        name=f"{label}@{budget}",
        arm=arm,
        label=label,
        budget=budget,
        base=base,
        digest=state.digest,
        pruning=pruning_options(state, budget, field),
        frames=frames,
        refused=refused,
        named=named,
    )


def _build_controls(norm: Case, rule: int | str) -> Iterator[Case]:
    """The controls at a case's budget: K random tokens, and an alternative without a plugin.

    The alternative is the image resized to K tokens. For a video, if K is a share, it is that
    share of the frames with all tokens.
    """
    budget = norm.budget
    frames = norm.frames
    pruning: dict[str, JsonValue] = {"keep": "random", "budget": budget}
    if frames:  # only a state with rules for frames prunes videos
        pruning = {**norm.pruning, "keep": "random"}
    yield norm.model_copy(
        update={
            "name": f"random@{budget}",
            "arm": "random",
            "label": "random keep",
            "digest": "",
            "pruning": pruning,
            "refused": "",
        }
    )
    label = RESIZED
    pruning = {"keep": "resized", "budget": budget}
    if frames:
        if not isinstance(rule, str) or ":" in rule:
            return
        share = Fraction(rule.removesuffix("%")) / (100 if rule.endswith("%") else 1)
        label = FEWER_FRAMES
        pruning = {"enabled": False}
        frames = max(1, round(frames * share))
    yield Case(
        name=f"resized@{budget}",
        arm="resized",
        label=label,
        budget=budget,
        pruning=pruning,
        frames=frames,
    )


def _residual_on(policy: str, videos: bool) -> PruningState:
    """The shipped state on base policy ``policy``, with its rules for frames if ``videos``."""
    source = load_state(_SOURCE)
    if policy == source.base_policy.name:
        return source
    data = source.model_dump(mode="json")
    data |= {
        "name": f"{_SOURCE}-on-{policy}",
        "base_policy": {"name": policy, "params": {}},
    }
    state = load_state(data | {"provenance": {}})
    return (
        state.model_copy(update={"frames": load_state(policy).frames})
        if videos
        else state
    )


def _read_states(names: Sequence[str], frames: int) -> list[PruningState]:
    """Read states by name or file; ``all`` is ``autoprune``'s exchange on every base policy."""
    states = list[PruningState]()
    for name in names:
        if name == "all":
            states += [_residual_on(policy, frames > 0) for policy in BASE_POLICIES]
        else:
            states.append(load_state(name))
    return states


def read_chosen_by(names: Sequence[str]) -> dict[int, str]:
    """The images by whose questions searches chose each state of ``names``, by ``Case.named``."""
    states = enumerate(_read_states(names, frames=0), 1)
    return {place: state.provenance.chosen_by for place, state in states}


def _strip_to_base(state: PruningState) -> PruningState:
    """``state`` without its exchange: its base policy with the same parameters."""
    policy = state.base_policy
    data = load_state(policy.name).model_dump(mode="json")
    return load_state(data | {"base_policy": policy.model_dump(mode="json")})


class _Labels:
    """Distinct labels for states, which are used in tables and in the names of cases."""

    def __init__(self) -> None:
        # Names of the controls' cases begin with these labels.
        controls = ("random", "resized")
        self._labels = {(control, ""): control for control in controls}

    def label(self, state: PruningState, suffix: str) -> str:
        """The state's name, followed by ``suffix`` if a control or another state has the name."""
        label = state.name
        if label in self._labels.values():
            label += suffix
        return self._labels.setdefault((state.name, state.digest), label)


def build_cases(
    names: Sequence[str],
    budget_texts: Sequence[int | str],
    cells: Sequence[str] = (),
    frames: int = 0,
) -> list[Case]:
    """The cases: the full model, and for each budget the controls, base policies and states.

    Every state follows its base policy. ``names``: states by name or file; ``all`` is the exchange
    of ``autoprune`` on every base policy, which gives a table of base policies. ``cells``: rules
    for dropping cells before the vision tower; each rule adds a case that only drops cells, and
    repeats each case of a state or base policy with the rule applied first. ``frames``: number of
    frames sampled of a video; above 0, budgets are those of videos. Raises :class:`BudgetError` for
    an invalid budget, and :class:`StateError` for an invalid state or rule of cells.
    """
    rules = {
        text: BudgetCall.parse(text, "--budgets", video=frames > 0).rule()
        for text in budget_texts
    }
    builder = _CaseBuilder(_read_states(names, frames), frames)
    cases = [FULL.model_copy(update={"frames": frames})]
    for text, rule in rules.items():
        # "1/8" remains a text; "64" becomes the number 64.
        budget = rule if isinstance(rule, int) else text
        cases += builder.build_for_budget(budget, rule)
    selections = [case for case in cases if case.digest]
    for text in cells:
        cell_rule = Cells.parse(text, "--cells")
        if cell_rule is not None:
            cases += builder.build_for_cells(cell_rule, selections)
    # States share base policies: the last of several cases with one name replaces the first.
    return list({case.name: case for case in cases}.values())


class _CaseBuilder:
    """Builds the cases of the evaluated states."""

    def __init__(self, states: Sequence[PruningState], frames: int) -> None:
        self._states = states
        self._frames = frames
        self._prune = partial(_prune_case, frames)
        self._norm = load_state("norm")
        self._named = {
            state.digest: number
            for number, state in reversed([*enumerate(states, 1)])
            if state.digest != self._norm.digest
        }
        """Place of each state that the user named, by its digest; ``norm`` has none."""
        # States get their labels before base policies do, because both may have the same name.
        self._labels = _Labels()
        self._state_labels = [
            self._labels.label(state, f"-{state.digest[:12]}") for state in states
        ]

    def build_for_budget(self, budget: int | str, rule: int | str) -> Iterator[Case]:
        """The cases at one budget: controls, norm, and each state after its base policy alone."""
        norm = self._norm
        label = self._labels.label(norm, f"-{norm.digest[:12]}")
        by_norm = self._prune("norm", label, norm, budget)
        yield from _build_controls(by_norm, rule)
        yield by_norm
        for state, label in zip(self._states, self._state_labels, strict=True):
            alone = _strip_to_base(state)
            base_label = self._labels.label(alone, f"-of-{label}")
            arm = self._find_base_arm(alone)
            named = self._named.get(alone.digest, 0)
            yield self._prune(arm, base_label, alone, budget, named=named)
            if state.digest == alone.digest:
                continue  # the state is a base policy alone, which has its case now
            base_name = f"{base_label}@{budget}"
            named = self._named[state.digest]
            arm = self._find_arm(state)
            yield self._prune(arm, label, state, budget, base_name, named)

    def build_for_cells(self, rule: Cells, cases: Sequence[Case]) -> Iterator[Case]:
        """A case that only drops cells by ``rule``, and ``cases`` with the rule applied first."""
        cell_label = f"all but {rule} cells"
        everything = self._norm.model_copy(update={"cells": rule})
        pruning = pruning_options(everything, "100%")
        yield Case(name=cell_label, arm="full", label=cell_label, pruning=pruning)
        for case in cases:
            state = PruningState.model_validate(case.pruning["state"])
            trimmed = state.model_copy(update={"cells": rule})
            label = f"{case.label} of {cell_label}"
            yield self._prune(
                case.arm, label, trimmed, case.budget, case.name, case.named
            )

    def _find_base_arm(self, alone: PruningState) -> Arm:
        """Arm of a base policy alone: ``norm``, ``found`` if the user named it, else ``base``."""
        if alone.digest == self._norm.digest:
            return "norm"
        return "found" if alone.digest in self._named else "base"

    def _find_arm(self, state: PruningState) -> Arm:
        """Arm of a state with an exchange: ``autoprune`` for the shipped one, else ``found``."""
        shipped = _residual_on(state.base_policy.name, self._frames > 0)
        return "autoprune" if state.digest == shipped.digest else "found"
