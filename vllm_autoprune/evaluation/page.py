"""The page of an evaluation: result, comparison with resizing, changed answers, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os.path import commonprefix

from vllm_autoprune.evaluation.journal import MME, Case
from vllm_autoprune.evaluation.report import MIN_IMAGES, Comparison, Report, Winner
from vllm_autoprune.report import (
    Cell,
    Chart,
    Document,
    Mark,
    Row,
    Section,
    Series,
    Table,
    Tone,
)
from vllm_autoprune.statistics import Estimate

_NONE = "-"
_TRIAL_IMAGES = 20
"""With fewer images than this, bootstrap intervals over images are too narrow."""

_APART = 0.006
"""Distance in a chart between the marks of methods at one K, as a share of the largest K."""

_VERDICTS: Mapping[Winner, str] = {
    "pruning": "pruning beats {rival}",
    "resizing": "{rival} beats pruning",
    "not decided": "not decided between pruning and {rival}",
    "too few images": f"images are too few to decide (at least {MIN_IMAGES})",
}
_TONES: Mapping[Winner, Tone] = {"pruning": "good", "resizing": "bad"}

_FIGURES = (
    ("accuracy", "% right", 1),
    ("agreement", "% agree", 1),
    ("token_agreement", "% of tokens", 1),
    ("same", "same until, %", 1),
    ("per_token", "ln p a token", 3),
    ("logprob", "ln p", 3),
)
"""Fields of a row, with their titles in tables and their number of decimals."""

_ACC_NOTE = (
    "Acc. is the mean over benchmarks{mme}. Rel. is given by "
    "both definitions in use: 100 x Acc. over the full model's Acc., and 100 x the mean over "
    "benchmarks of a score over the full model's."
)
_NOTE = (
    "Differences are paired on the same questions, each with its 95 % interval ({images:,} images "
    "resampled). If an interval contains 0, the data show no difference. ln p is the mean "
    "log-probability of the reference answer; base is the base policy alone at the same K, {rival}."
)
_RESIZED_NOTE = (
    "resized the resize control: the image resized to at most K tokens, or pooled to K where the "
    "model has a fixed number of them"
)
_FRAMES_NOTE = (
    "fewer frames, where K is a share, all tokens of the same share of the {frames} frames of a "
    "video"
)
_REFERENCE_NOTE = (
    "The reference is the unpruned model's greedy answer, {tokens:.1f} tokens on average. % agree: "
    "greedy decoding gives exactly it. % of tokens: it gives a token after those of the reference "
    "before it, so a wrong turn costs one token and not what would have followed it. Same until: "
    "the share of tokens before the first that differs."
)
_AGREEMENT_NOTE = (
    "Agreement is not accuracy: where the unpruned model is wrong, agreeing is wrong too, and an "
    "answer in other words may be as good. Long answers rarely agree to their end, so the share of "
    "tokens decides here. ln p a token falls with how sure a model is of another, and may say the "
    "opposite."
)


def build_page(report: Report, picture: Callable[[str], str] | None = None) -> Document:
    """The page of a report; ``picture`` returns a question's data URL by id, or an empty text."""
    sections = list[Section]()
    if verdicts := list(_describe_verdicts(report)):
        sections.append(_compare_arms(report, verdicts))
    if (chart := _draw_chart(report)) is not None:
        sections.append(chart)
    if report.examples and report.case is not None:
        sections.append(_show_examples(report, report.case, picture))
    if report.rows:
        sections.append(_collect_tables(report))
    setup = report.setup
    facts = [
        f"model: {setup.model}",
        f"data: {setup.data}",
        f"scored by {setup.scorer}",
        f"{report.questions:,} questions about {report.images:,} images",
    ]
    if setup.left_out:
        facts.append(setup.left_out_text)
    if report.left_out:
        facts.append(
            f"{report.left_out:,} left out: their answer has no token to be scored"
        )
    if report.cut:
        facts.append(f"{report.cut:,} answers of the unpruned model were cut there")
    measured = "Accuracy"
    if setup.score == "agrees":
        measured = "Agreement with the unpruned model"
    title = f"{measured}: {setup.suite}"
    tone = _choose_tone(report)
    return Document(title, _answer(report), tone, report.reasons, facts, sections)


def _choose_tone(report: Report) -> Tone:
    """Tone of the answer.

    It is good only if nothing is lost against a model that is mostly right, on questions that did
    not choose the state.
    """
    if not report.valid:
        return "bad"
    if report.overall is None:
        return "open"
    tone = _TONES.get(report.overall.winner, "open")
    is_flattered = report.case is not None and report.case.chosen > 0
    is_doubtful = report.is_loss_shown or report.is_mostly_wrong or is_flattered
    return "open" if tone == "good" and is_doubtful else tone


def _compare_arms(report: Report, verdicts: Sequence[str]) -> Section:
    """Comparison with the alternative without a plugin: verdicts, and checks of the measure."""
    texts = [*verdicts]
    full = report.full
    if full is not None and full.accuracy is not None:
        share = f"{full.accuracy.value:.1f} %"
        texts.insert(0, f"With all tokens, {share} of the answers are right.")
    if full is not None and full.agreement is not None:
        # It is below 100 if rounding or a chat template changes an answer.
        again = f"{full.agreement.value:.1f} % of its own answers again"
        texts.append(f"Scored in the same way, the unpruned model gives {again}.")
    if report.rank_correlations:
        titles = {name: title for name, title, _ in _FIGURES}
        correlations = "; ".join(
            f"{titles[name]} {rank.value:.2f}{_interval(rank, '{:.2f}'.format)}"
            for name, rank in report.rank_correlations.items()
        )
        texts.append(f"Rank correlation with % right over the states: {correlations}.")
    if report.setup.score == "agrees":
        texts.append(_AGREEMENT_NOTE)
    kinds = _tabulate_kinds(report)
    tables = [kinds] if kinds.rows else []
    return Section(f"Pruning or {_rival(report)}?", texts, tables=tables)


def _tabulate_kinds(report: Report) -> Table:
    """Who is better, and by how much, for each state and kind of question."""
    states = {case.name: case for case in report.states}
    rows = list[Row]()
    for part in report.resizing:
        if part.kind and (case := states.get(part.case)):
            better = _format(part.difference)
            rows.append([case.label, part.kind, part.winner, str(case.budget), better])
    head = ["state", "questions", "better", "K", f"points less {_rival(report)}"]
    return Table("By kind of question", head, rows, "lll")


def _draw_chart(report: Report) -> Section | None:
    """Chart of accuracy over K with one line a method; None if answers have no scores."""
    title = "Accuracy over K"
    y_label = "% right"
    figure = "accuracy"
    if report.setup.score == "agrees":
        title = "Agreement over K"
        y_label = "% of the unpruned model's tokens"
        figure = "token_agreement"
    methods: dict[str, list[Mark]] = {}
    rules: dict[str, float] = {}
    rows = sorted(report.rows, key=lambda row: row.case.budget_order)
    largest = rows[-1].case.budget_order[0] if rows else 0
    for row in rows:
        case = row.case
        estimate: Estimate | None = dict(row)[figure]
        if estimate is None:
            continue
        if case.name == "full":
            rules[f"all tokens {estimate.value:.1f} %"] = estimate.value
        elif case.budget:
            marks = methods.setdefault(case.title, [])
            # Marks at one K are drawn beside each other, so that their intervals do not overlap.
            x = case.budget_order[0] + _APART * largest * list(methods).index(
                case.title
            )
            tip = f"{case.title}, K = {case.budget}: {estimate.value:.1f} %"
            tip += _interval(estimate, "{:.1f}".format)
            bounds = (estimate.low, estimate.high)
            if not estimate.is_bounded:
                bounds = (estimate.value, estimate.value)
            marks.append(Mark(x, estimate.value, tip, *bounds))
    if not methods:
        return None
    x_label = "visual tokens kept, K"
    if any(isinstance(row.case.budget, str) for row in rows):
        x_label += ", of an image of 576" if not report.frames else ", of frames of 576"
    series = [
        Series(name, marks, colour=colour)
        for colour, (name, marks) in enumerate(methods.items())
    ]
    caption = f"{title}, with 95 % intervals; point at a mark for its figures"
    chart = Chart(caption, x_label, y_label, series, rules, linear=True)
    return Section(title, charts=[chart])


def _show_examples(
    report: Report, case: Case, picture: Callable[[str], str] | None
) -> Section:
    """The answers that pruning changed most, beside those of the unpruned model."""
    rows = list[list[Cell | str]]()
    for example in report.examples:
        row: list[Cell | str] = [
            Cell(example.image, image=picture(example.id) if picture else ""),
            example.question,
            example.unpruned,
            example.pruned or _NONE,
            _last_common_words(example.unpruned, example.pruned),
            f"{example.per_token:+.2f}",
        ]
        rows.append(row)
    head = [
        "image",
        "question",
        "all tokens",
        case.label,
        "same until",
        "ln p a token",
    ]
    caption = "The largest falls of ln p a token, one an image: no sample of the others"
    title = f"What changed most: {case.label}, K = {case.budget}"
    return Section(title, tables=[Table(caption, head, rows, "lllllr")])


def _last_common_words(unpruned: str, pruned: str | None) -> str:
    """The last five words that two answers share before they differ."""
    if pruned is None or pruned == unpruned:
        return _NONE
    words = commonprefix([unpruned.split(), pruned.split()])  # noqa: RUF071 -- of lists
    ending = " ".join(words[-5:])
    if len(words) > 5:
        ending = f"... {ending}"
    return ending or "the start"


def _collect_tables(report: Report) -> Section:
    """Tables of all figures, with notes that explain them."""
    notes = list[str]()
    if _has_aggregates(report):
        mme = ""
        if MME in report.rows[0].benchmarks:
            mme = f", with MME divided by {report.setup.mme_divisor:g} first"
        notes.append(_ACC_NOTE.format(mme=mme))
    rival = _RESIZED_NOTE
    if report.frames:
        rival = _FRAMES_NOTE.format(frames=report.frames)
    notes.append(_NOTE.format(images=report.images, rival=rival))
    if report.tokens:
        notes.append(_REFERENCE_NOTE.format(tokens=report.tokens))
    tables = list(_tables(report))
    if refused := [
        [case.title, str(case.budget), case.refused] for case in report.refused
    ]:
        tables.append(Table("Not measured", ["method", "K", "why"], refused, "lll"))
    return Section("Tables", notes, tables=tables)


def _answer(report: Report) -> str:
    """The result of the evaluation in one sentence."""
    if not report.valid:
        return "Not valid: the reasons are below, and no figure here is to be quoted."
    case = report.case
    row = report.row
    if case is None or row is None:
        return (
            "No state was measured here: the tables have all tokens and the controls."
        )
    answer = f"{case.label} at K = {case.budget}"
    if case.chosen:
        answer += f" ({case.chosen_text})"
    if row.accuracy is not None:
        answer += f" answers {row.accuracy.value:.1f} % of the questions right"
        answer += _describe_gaps(report)
    elif row.agreement is not None and row.token_agreement is not None:
        answer += (
            f" gives {row.agreement.value:.1f} % of the unpruned model's answers and "
        )
        answer += f"{row.token_agreement.value:.1f} % of their tokens"
    if report.is_mostly_wrong and report.full and report.full.accuracy:
        share = report.full.accuracy.value
        answer += f"; with all tokens only {share:.1f} % are right, so these questions tell little"
    if report.overall is not None:
        answer += f"; {_describe_difference(report, report.overall)}"
    if left_out := report.setup.left_out:
        answer += f"; {left_out:,} questions that chose a state are left out"
    if report.images < _TRIAL_IMAGES:
        images = (
            f"{report.images} images, no measurement (at least {_TRIAL_IMAGES} images)"
        )
        return f"A trial run on {images}: {answer}."
    return f"{answer}."


def _describe_gaps(report: Report) -> str:
    """Text on how the report's state differs in right answers from all tokens and its base."""
    text = ""
    row = report.row
    if row is None:
        return text
    if row.to_full is not None and (gap := row.to_full.accuracy) is not None:
        text = f", {_format(gap)} points against all tokens"
        text += "; no difference is shown" if gap.low <= 0 <= gap.high else ""
    if row.to_base is not None and (gain := row.to_base.accuracy) is not None:
        text += f"; {_format(gain)} against {row.case.base.partition('@')[0]} alone"
    return text


def _rival(report: Report) -> str:
    """Name of the alternative without a plugin."""
    return "sampling fewer frames" if report.frames else "resizing"


def _describe_difference(report: Report, overall: Comparison) -> str:
    """Text on whether pruning or the alternative wins, and by how much."""
    verdict = _VERDICTS[overall.winner].format(rival=_rival(report))
    text = f"{verdict}, {_format(overall.difference)} points "
    if report.setup.score == "right":
        return f"{text}right"
    (row,) = [row for row in report.rows if row.case.name == overall.case]
    logprob = row.to_resized.per_token if row.to_resized else None
    return f"{text}of tokens and {_format(logprob, 3)} ln p a token"


def _describe_verdicts(report: Report) -> Iterator[str]:
    """One line for each evaluated state: who wins, and by how much."""
    rows = {row.case.name: row for row in report.rows}
    for overall in report.resizing:
        if overall.kind is not None or (row := rows.get(overall.case)) is None:
            continue
        if row.case not in report.states:
            continue
        control = rows.get(f"resized@{row.case.budget}")
        more = (row.prompt_tokens or 0.0) - ((control and control.prompt_tokens) or 0.0)
        verdict = _describe_difference(report, overall)
        line = f"{row.case.title}, K = {row.case.budget}: {verdict}"
        # A resized image may have a few tokens fewer than K.
        line += f" with {more:.1f} tokens more." if control and more >= 0.5 else "."
        yield line


def _has_aggregates(report: Report) -> bool:
    """Whether *Acc.* is more than the share of right answers: with MME, or several benchmarks."""
    return len(report.rows[0].benchmarks) > 1 or MME in report.rows[0].benchmarks


def _tables(report: Report) -> Iterator[Table]:
    """The paper's main table, one part for each budget, each with the full model on top.

    The gain of a residual, or of a q_e, is its difference from the base policy.
    """
    columns = [
        c for c in _FIGURES if any(dict(row)[c[0]] is not None for row in report.rows)
    ]
    has_aggregates = _has_aggregates(report)
    # Acc. has no difference if a benchmark does not score single answers.
    has_acc = has_aggregates and any(
        row.to_full and row.to_full.acc for row in report.rows
    )
    unpaired = {
        "same",
        "accuracy" if has_acc else "",
        "logprob" if report.tokens else "",
    }
    metrics = [("acc", "Acc.", 1)] if has_acc else []
    metrics += [column for column in columns if column[0] not in unpaired]
    benchmarks = list(report.rows[0].benchmarks)
    references = ["full", "base"]
    references.append("fewer frames" if report.frames else "resized")
    if report.case and any(row.to_case for row in report.rows):
        references.append(report.case.label)
    head = ["method", *(title for _, title, _ in columns)]
    if has_aggregates:
        head += [*benchmarks, "Acc.", "Rel., ratio of means", "Rel., mean of ratios"]
    head += [f"{title} less {other}" for _, title, _ in metrics for other in references]
    cases = sorted(
        (row.case for row in report.rows), key=lambda case: case.budget_order
    )
    for budget in dict.fromkeys(case.budget for case in reversed(cases) if case.budget):
        rows = []
        for row in report.rows:
            if row.case.budget not in (0, budget):
                continue
            means = [(dict(row)[name], digits) for name, _, digits in columns]
            cells = [
                f"{mean.value:.{digits}f}" if mean else _NONE for mean, digits in means
            ]
            if has_aggregates:
                scores: list[float | None] = [
                    row.benchmarks[name] for name in benchmarks
                ]
                scores += [row.all.acc, row.all.ratio_of_means, row.all.mean_of_ratios]
                cells += [
                    _NONE if score is None else f"{score:.1f}" for score in scores
                ]
            for metric, _, digits in metrics:
                compared = (row.to_full, row.to_base, row.to_resized, row.to_case)
                for differences in compared[: len(references)]:
                    estimate = dict(differences)[metric] if differences else None
                    cells.append(_format(estimate, digits))
            rows.append([row.case.title, *cells])
        yield Table(f"K = {budget}", head, rows, "l" + "r" * (len(head) - 1))


def _format(estimate: Estimate | None, digits: int = 1) -> str:
    """A difference with its interval, such as ``+5.1 (+2.0 to +8.1)``.

    A value that rounds to zero gets no sign, so that it does not read as a loss.
    """
    if estimate is None:
        return _NONE
    sign = partial(_sign, digits=digits)
    return sign(estimate.value) + _interval(estimate, sign)


def _sign(figure: float, digits: int) -> str:
    """A figure with its sign, or without one if it rounds to zero."""
    rounded = round(figure, digits)
    return f"{rounded:+.{digits}f}" if rounded else f"{0:.{digits}f}"


def _interval(estimate: Estimate, show: Callable[[float], str]) -> str:
    """The interval of a figure in brackets; empty if it has none."""
    if not estimate.is_bounded:
        return ""
    return f" ({show(estimate.low)} to {show(estimate.high)})"
