"""Runs of an evaluation: cases that a running server can serve, and report files.

Every request carries the pruning options of its case, so the server needs ``--autoprune-requests
states``. Whatever ends a run, the answers recorded until then are kept, and the report tells
whether they are valid.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import ConfigError, Refusal
from vllm_autoprune.evaluation.cases import FULL
from vllm_autoprune.evaluation.journal import (
    JOURNAL,
    Case,
    EvaluationError,
    Journal,
    Setup,
)
from vllm_autoprune.evaluation.page import build_page
from vllm_autoprune.evaluation.pictures import encode
from vllm_autoprune.evaluation.report import PRUNING_ARMS, Report
from vllm_autoprune.evaluation.served_page import ALLOW, SHOW_PAGE, ServedPage
from vllm_autoprune.http_client import FAILURES, RequestRefused, ServerClient
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE

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

        The server is asked what requests may choose, if it has a page for that, and then sent a
        small request for each case. The journal gets the reasons of refused cases, and a case of
        the server's own state if none of ``cases`` has it. Raises :class:`ConfigError` if the
        server does not answer, serves another model, or refuses all tokens or every state.
        """
        with ServerClient(self.url, self.connection) as client:
            with client.reporting_failures():
                models = client.list_models()
            model = client.choose_model(models, self.model)
            served = ServedPage.read(client)
            if served.allows.get("level") in ("none", "budget"):
                what = f"lets requests set {served.requests}"
                raise ConfigError.of(client.url, what, ALLOW, subject="eval")
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
            text = f"{client.url}: no row is marked as its own state -> {SHOW_PAGE}"
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
    fix = f"name states that its model serves, such as --state {DEFAULT_STATE}"
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
    fix = ALLOW
    if problem.kind in _UNTRUSTED:
        reason = f"it takes no {problem.kind} of theirs"
    if problem.kind == "media_io_kwargs" or is_about_videos:
        fix += " --trust-request-mm-kwargs"
    return ConfigError.of(problem.where, f"{what} ({reason})", fix, subject="eval")
