"""Runs of an evaluation: its cases, those that a running server can serve, and report files.
Every request carries the pruning options of its case, so the server needs ``--autoprune-requests
states``. Whatever ends a run, the answers recorded until then are kept, and the report tells
whether they are valid.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, JsonValue, ValidationError

from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import AutopruneError, ConfigError, Refusal
from vllm_autoprune.evaluation.journal import (
    FEWER_FRAMES,
    JOURNAL,
    RESIZED,
    Arm,
    Case,
    EvaluationError,
    Journal,
    Setup,
)
from vllm_autoprune.evaluation.page import build_page
from vllm_autoprune.evaluation.pictures import encode
from vllm_autoprune.evaluation.report import PRUNING_ARMS, Report
from vllm_autoprune.evaluation.scoring_request import pruning_options
from vllm_autoprune.http_client import FAILURES, RequestRefused, ServerClient
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.cells import Cells
from vllm_autoprune.tpdsl.frames import Frames
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState

_ALLOW = "start it with --autoprune-state NAME --autoprune-requests states"
_SERVE_VIDEOS = "serve a model of whose videos tokens are chosen (docs/support.md)"


def evaluate(
    setup: Setup,
    cases: Sequence[Case],
    measure: Callable[[Journal], None],
    folder: Path,
    *,
    resume: bool,
    picture: Callable[[str], str] | None = None,
) -> Report:
    """Measure what is missing and write the report files; ``picture``: see :func:`build_page`.

    ``measure`` adds the missing answers to the journal. If it cannot start, it raises
    :class:`ConfigError`, and so does this function; if it cannot continue, it raises
    :class:`EvaluationError`, which becomes a reason in the report.
    """
    path = folder / JOURNAL
    if not resume and path.exists() and path.stat().st_size:
        what = "already contains an evaluation"
        fix = "add --resume, or name another folder"
        raise ConfigError.of(f"-o {folder}", what, fix, subject="eval")
    with Journal(path) as journal:
        contents = journal.contents
        interruptions = list[str]()
        is_new = not (contents.answers or contents.totals)
        # A complete evaluation does not ask the server again, so its recorded mark is kept.
        marks = {name: case.served for name, case in contents.cases.items()}
        cases = [
            c.model_copy(update={"served": marks.get(c.name, False)}) for c in cases
        ]
        journal.append([setup, *cases])
        try:
            measure(journal)
        except EvaluationError as error:
            interruptions.append(f"stopped: {error}")
        except KeyboardInterrupt:
            text = f"stopped; {path} keeps what was measured, --resume goes on from it"
            raise KeyboardInterrupt(text) from None
        except ConfigError:
            if is_new:
                path.unlink()  # otherwise the corrected command would need --resume
            raise
        report = Report.build(contents, interruptions)
    try:
        (folder / "report.json").write_text(report.format_json())
        page = build_page(report, picture)
        (folder / "report.md").write_text(page.render_markdown())
        (folder / "report.html").write_text(page.render_html())
    except OSError as error:
        fix = f"make room; {JOURNAL} is kept, and --resume writes the report from it"
        raise EvaluationError.of(str(folder), str(error.strerror), fix) from None
    return report


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
    for dropping cells before the vision tower; a rule adds a case of its own, and one that
    combines it with each case of a state or base policy. ``frames``: number of frames sampled of a
    video; above 0, budgets are those of videos. Raises :class:`BudgetError` for an invalid budget,
    and :class:`StateError` for an invalid state or rule of cells.
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
        self._named = {state.digest for state in states}
        """Digests of the states that the user named."""
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
            yield self._prune(self._find_base_arm(alone), base_label, alone, budget)
            if state.digest == alone.digest:
                continue  # the state is a base policy alone, which has its case now
            base_name = f"{base_label}@{budget}"
            yield self._prune(self._find_arm(state), label, state, budget, base_name)

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
            yield self._prune(case.arm, label, trimmed, case.budget, case.name)

    def _find_base_arm(self, alone: PruningState) -> Arm:
        """Arm of a base policy alone: ``found`` if the user named it, else ``norm`` or ``base``."""
        if alone.digest in self._named:
            return "found"
        return "norm" if alone.digest == self._norm.digest else "base"

    def _find_arm(self, state: PruningState) -> Arm:
        """Arm of a state with an exchange: ``autoprune`` for the shipped one, else ``found``."""
        shipped = _residual_on(state.base_policy.name, self._frames > 0)
        return "autoprune" if state.digest == shipped.digest else "found"


class _Served(BaseModel):
    """The fields that are read of ``/v1/autoprune``; the defaults if a server has no such page."""

    state: str | None = ""
    digest: str = ""
    requests: str = ""
    allows: dict[str, object] = {}

    def find_own_case(self, cases: Sequence[Case]) -> Case | None:
        """The server's own state as a refused case; None if one of ``cases`` has this state."""
        if not self.state or self.digest in {case.digest for case in cases}:
            return None
        # For videos, a case adds rules for frames to a state for pictures, which changes the
        # digest; the state is recognised by its name.
        about_videos = any(case.frames for case in cases)
        if about_videos and self.state in {case.label for case in cases}:
            return None
        return Case(
            name=f"served {self.digest[:12]}",
            arm="found",
            label=self.state,
            digest=self.digest,
            refused=f"was not asked -> name it with --state {self.state}, or its file",
            served=True,
        )


class Server(NamedTuple):
    """A server under evaluation, and how to reach it."""

    url: str
    connection: Connection
    model: str | None
    """Name of the model; None for the first that the server lists."""
    max_in_flight: int

    def check(
        self, cases: Sequence[Case], journal: Journal
    ) -> tuple[str, Collection[str]]:
        """The server's model, and the names of the cases that it serves.

        It is asked what requests may choose, if it has a page for that, and then sent a small
        request for each case. The journal gets the reasons of refused cases and the case of the
        server's own state, which is added if it is not among them. Raises :class:`ConfigError` if
        the server does not answer, serves another model, or refuses all tokens or every state.
        """
        with ServerClient(self.url, self.connection) as client:
            with client.reporting_failures():
                models = client.list_models()
            model = client.choose_model(models, self.model)
            served = _Served()
            with contextlib.suppress(*FAILURES, ValidationError):
                # A server without the plugin may have another page at this address.
                served = _Served.model_validate(client.read_served())
            if served.state is None:
                raise ConfigError.of(
                    client.url, "serves no state", _ALLOW, subject="eval"
                )
            if served.allows.get("level") in ("none", "budget"):
                what = f"lets requests set {served.requests}"
                raise ConfigError.of(client.url, what, _ALLOW, subject="eval")
            refusals = _find_refusals(client, model, cases)
            _require_a_state(cases, refusals)
        checked = list[Case]()
        for case in cases:
            update = dict[str, object]()
            if case.name in refusals:
                update["refused"] = refusals[case.name].reason
            elif case.digest and case.digest == served.digest and not case.refused:
                update["served"] = True
            checked.append(case.model_copy(update=update))
        if not served.state:
            fix = "start it with VLLM_PLUGINS=autoprune,autoprune_endpoint"
            text = f"{client.url}: no row is marked as its own state -> {fix}"
            print(text, file=sys.stderr)
        if (own_case := served.find_own_case(cases)) is not None:
            checked.append(own_case)
        journal.append(checked)
        return model, [case.name for case in checked if not case.refused]


def _find_refusals(
    client: ServerClient, model: str, cases: Sequence[Case]
) -> dict[str, RequestRefused]:
    """Refusals of a server by the name of the case.

    Each request is about a small picture, or a video of such pictures. Raises
    :class:`ConfigError` if the server refuses the case with all tokens.
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (224, 224), "grey").save(buffer, "PNG")
    kind = "image_url"
    url = encode("image/png", [buffer.getvalue()])
    if any(case.frames for case in cases):
        kind = "video_url"
        url = encode("video/jpeg", [buffer.getvalue()] * 4)
    content = [{"type": kind, kind: {"url": url}}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": content}]
    refusals = dict[str, RequestRefused]()
    for case in cases:
        if case.refused:
            continue
        body = {"model": model, "messages": messages, "max_tokens": 1, **case.fields}
        try:
            client.chat(body)
        except RequestRefused as error:
            refusals[case.name] = error
            kind = error.problems[0].kind
            if case.name == FULL.name and case.frames and kind not in _CHOICES:
                what = f"takes no video ({error.reason})"
                raise ConfigError.of(
                    client.url, what, _SERVE_VIDEOS, subject="eval"
                ) from None
            if case.name == FULL.name:
                what = "lets requests choose nothing"
                raise _no_choice(what, error, case.frames > 0) from None
        except FAILURES:
            continue  # the evaluation meets this failure too, and reports it
    return refusals


def _require_a_state(
    cases: Sequence[Case], refusals: Mapping[str, RequestRefused]
) -> None:
    """Raise :class:`ConfigError` if the server refuses every state that could be sent to it."""
    states = [c.name for c in cases if c.arm in PRUNING_ARMS and not c.refused]
    if not states or not refusals.keys() >= set(states):
        return
    error = refusals[states[0]]
    problem = error.problems[0]
    is_about_videos = any(case.frames for case in cases)
    if problem.kind in _CHOICES:
        raise _no_choice("refuses every state", error, is_about_videos)
    reason = error.reason
    fix = "name states that its model serves, such as --state cen_divprune"
    if is_about_videos:
        # An older plugin names no kind of refusal, and its model may serve videos unpruned.
        fix = f"name one that prunes videos, such as --state vcast, or {_SERVE_VIDEOS}"
    if problem.kind == Refusal.WHOLE_VIDEO:
        reason = problem.what
        fix = _SERVE_VIDEOS
    what = f"refuses every state: {reason}"
    raise ConfigError.of(problem.where, what, fix, subject="eval")


_UNTRUSTED = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that vLLM itself refuses without --trust-request-mm-kwargs."""
_CHOICES = (Refusal.NOT_ALLOWED, *_UNTRUSTED)
"""Kinds of refusals by a server that does not let requests choose their pruning or frames."""


def _no_choice(what: str, error: RequestRefused, is_about_videos: bool) -> ConfigError:
    """The error for a server that does not let requests choose their pruning or frames.

    The server's own advice is left out, because it is for other requests. It also names only one
    refused field at a time, and requests about videos have two.
    """
    problem = error.problems[0]
    reason = problem.what
    fix = _ALLOW
    if problem.kind in _UNTRUSTED:
        reason = f"it takes no {problem.kind} of theirs"
    if problem.kind == "media_io_kwargs" or is_about_videos:
        fix += " --trust-request-mm-kwargs"
    return ConfigError.of(problem.where, f"{what} ({reason})", fix, subject="eval")
