"""Accuracy of mini-LLaVA: cases, questions, and runs on a fake server, from the command line."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from subprocess import Popen
from typing import NoReturn

import pytest

from benchmarks.accuracy import minillava as module
from benchmarks.accuracy.minillava import (
    BUDGETS,
    FAMILIES,
    Family,
    MiniLlavaSuite,
    build_cases,
    default_scenes,
    find_model,
    main,
    parser,
    prepare_questions,
)
from benchmarks.server import ServerDied
from benchmarks.yardsticks.minillava import MiniLlava
from tests.benchmarks.accuracy.minillava_server import answering, arm, kept, reply
from tests.evaluation.samples import read_journal
from tests.offline_search.endpoint import Answer, Body, endpoint, error
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import JOURNAL, MME
from vllm_autoprune.evaluation.questions import questions_digest
from vllm_autoprune.evaluation.report import Report
from vllm_autoprune.evaluation.run import Progress, Settings, evaluate, residual_on
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state


def test_the_paper_s_tables_by_default() -> None:
    cases = build_cases(144, BUDGETS, FAMILIES)
    assert Counter(case.arm for case in cases) == {
        "full": 1, "random": 5, "resized": 5, "base": 80, "autoprune": 80, "found": 10,
        "quota": 29,
    }  # fmt: skip
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) and names[0] == "full"
    assert all(case.base in names for case in cases if case.base)
    assert not any(case.refused for case in cases)
    quotas = {case.quota for case in cases if case.arm == "quota"}
    ours = {case.quota for case in cases if case.arm == "autoprune"}
    assert quotas == {0, 1, 2, 4, 8, 16, 32} and ours == {2}


def test_the_residual_is_the_shipped_one_on_every_base_policy() -> None:
    source = load_state("autoprune")
    for policy in BASE_POLICIES:
        state = residual_on(policy)
        assert state.base_policy.name == policy
        assert (state.scoring, state.constraints) == (source.scoring, source.constraints)
    assert residual_on("cdpruner").digest == source.digest


def test_ablations_include_their_base_policy() -> None:
    names = [case.name for case in build_cases(144, [8], ["quota"])]
    assert names == ["full", "cdpruner@8", "cdpruner+autoprune@8",
                     *(f"quota-{quota}@8" for quota in (0, 1, 2, 4, 8))]  # fmt: skip


def test_one_token_is_served_without_exchanges() -> None:
    """With q_e = 2 and K = 1 the quota shrinks; no case is skipped silently."""
    cases = build_cases(144, [1], ["policies"])
    assert len(cases) == 1 + 2 * (len(BASE_POLICIES) - len(MiniLlava.equal_policies))


def test_no_base_policy_keeps_the_tokens_of_another() -> None:
    yardstick = MiniLlava()
    tokens = yardstick.encode(yardstick.draw("test", 1)).tokens
    kept = {}
    for case in build_cases(144, [18], ["policies"]):
        if case.arm == "base":
            policy = BASE_POLICIES[case.label]
            picks = policy.select(policy.default_params, tokens, 18).picks.sort(1).values
            kept[case.label] = tuple(picks.flatten().tolist())
    copies = [pair for pair in combinations(kept, 2) if kept[pair[0]] == kept[pair[1]]]
    assert copies == [] and len(kept) > 10


def test_a_budget_that_prunes_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--budgets 144 0: are not within 1..143"):
        build_cases(144, [8, 144, 0], FAMILIES)


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md").read_text()
SMALL = ["--scenes", "1", "--budgets", "8", "--cases", "random"]


def test_the_calls_in_the_docs_parse() -> None:
    calls = re.findall(r"^python -m benchmarks\.accuracy\.minillava(.*)", PAGE, re.MULTILINE)
    assert calls
    for call in calls:
        parser().parse_args(shlex.split(call))


def test_one_command_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with endpoint(answering) as server:
        call = ["--server-url", server.url, "--out", str(tmp_path)]
        assert main([*call, *SMALL]) == 0
        captured = capsys.readouterr()
        assert "### K = 8" in captured.out and "trial run" in captured.out
        assert "100%" in captured.err
        assert main([*call, *SMALL, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"report.html", "report.json", "report.md", "samples.jsonl"}


def test_an_invalid_report_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusing(body: Body, number: int) -> Answer:
        return error(400, "no") if number == 3 else answering(body, number)

    with endpoint(refusing) as server:
        assert main(["--server-url", server.url, "--out", str(tmp_path), *SMALL]) == 1
    assert "Not valid: " in capsys.readouterr().out


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["--dry-run", "--out", str(out), *SMALL]) == 0
    assert "vllm serve" in capsys.readouterr().out and not out.exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["--model", "/nowhere"], "has no llava/config.json"),
        (["--budgets", "144"], "are not within 1..143"),
    ],
)
def test_a_run_that_cannot_start_says_why(
    call: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(call) == 1
    assert message in capsys.readouterr().err


def test_the_embedded_model_and_its_questions() -> None:
    model = find_model("embedded")
    questions = prepare_questions(2)
    assert model.tokens == 144 and len(model.digest) == 12
    assert {one.record.image for one in questions} == {"0", "1"}
    assert all(one.image.startswith("data:image/png;base64,") for one in questions)
    paired = [one.record for one in questions if one.record.benchmark == MME]
    assert paired and all(one.category and one.pair for one in paired)
    answers = {one.answer for one in questions if one.record.benchmark == MME}
    assert answers == {"yes", "no"}
    open_kinds = {"digit", "colour", "shape", "text", "count", "quarter", "relation"}
    assert {one.record.benchmark for one in questions} == {MME, *open_kinds}


def test_fewer_scenes_are_a_prefix_of_more() -> None:
    few, more = prepare_questions(1), prepare_questions(2)
    assert list(more[: len(few)]) == list(few)
    assert questions_digest(few) != questions_digest(more)


def test_the_default_number_of_scenes_takes_half_an_hour() -> None:
    scenes = default_scenes(126)
    assert 50_000 < 126 * len(prepare_questions(scenes)) < 70_000
    assert default_scenes(1_000_000) == 8


def test_a_folder_is_another_model(tmp_path: Path) -> None:
    for part in ("llava", "clip"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text('{"image_seq_length": 576}')
    model = find_model(str(tmp_path))
    assert (model.name, model.tokens) == (tmp_path.name, 576)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no llava/config.json.*use embedded, or"):
        find_model(str(tmp_path))


SCENES = 2
MODEL = find_model("embedded")


def build_suite(families: Sequence[Family], scenes: int, settings: Settings) -> MiniLlavaSuite:
    return MiniLlavaSuite(MODEL, build_cases(MODEL.tokens, [8], families), scenes, settings)


def connect(url: str, *families: Family, name: str | None = None) -> MiniLlavaSuite:
    settings = Settings(url=url, served_name=name, max_in_flight=4, wait=0.01)
    return build_suite(families or ("random",), SCENES, settings)


def run(url: str, folder: Path, *families: Family, resume: bool = False) -> Report:
    progress = Progress(lambda line: None)
    return evaluate(connect(url, *families), folder, resume=resume, progress=progress)


def test_every_case_is_asked_every_question_once(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        report = run(server.url, tmp_path, "random", "quota")
    assert report.valid, report.reasons
    per_case = report.questions
    states = ("cdpruner", "autoprune", *(f"ablation-quota-{quota}" for quota in (0, 1, 2, 4, 8)))
    every = dict.fromkeys(("full", "random", *states), per_case)
    assert Counter(map(arm, server.requests)) == every
    assert {kept(body) for body in server.requests} == {144, 8}
    full, random = report.row("full"), report.row("random@8")
    assert full is not None and random is not None
    assert full.all.acc == 100.0 and random.all.acc == 0.0
    assert random.to_full is not None and random.to_full.logprob is not None
    assert random.to_full.logprob.value == pytest.approx(-2.9)
    assert (tmp_path / "report.md").read_text().startswith("# Accuracy: minillava")
    assert json.loads((tmp_path / "report.json").read_text())["valid"] is True


def test_requests_about_one_image_are_close_to_each_other(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        run(server.url, tmp_path, "quota")
    images = [body["messages"][0]["content"][0]["image_url"]["url"] for body in server.requests]
    turns = sum(before != after for before, after in pairwise(images))
    # Four are in flight, so a few of two neighbouring images may cross.
    assert len(set(images)) == SCENES and turns <= 1 + 2 * 4


def test_answered_questions_are_not_asked_again(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        first = run(server.url, tmp_path)
        asked = len(server.requests)
        path = tmp_path / JOURNAL
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-3]) + lines[-3][:10])
        again = run(server.url, tmp_path, resume=True)
        assert len(server.requests) == asked + 3
        more = run(server.url, tmp_path, resume=True)
        assert len(server.requests) == asked + 3
    assert first == again == more


def test_a_journal_is_continued_only_with_resume(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        run(server.url, tmp_path)
        with pytest.raises(ConfigError, match=r"already contains an evaluation.*--resume"):
            run(server.url, tmp_path)


def test_an_answer_that_continues_within_a_word_is_wrong(tmp_path: Path) -> None:
    def longer(body: Body, number: int) -> Answer:
        return reply(body, following="7" if arm(body) == "random" else ".")

    with endpoint(longer) as server:
        report = run(server.url, tmp_path)
    full, random = report.row("full"), report.row("random@8")
    assert full is not None and random is not None
    assert full.all.acc == 100.0 and random.all.acc == 0.0


def test_a_rejected_request_is_a_failure_not_a_wrong_answer(tmp_path: Path) -> None:
    def refusing(body: Body, number: int) -> Answer:
        return error(400, "no such budget") if arm(body) == "random" else answering(body, number)

    with endpoint(refusing) as server:
        report = run(server.url, tmp_path)
        asked = len(server.requests)
    assert not report.valid and report.row("random@8") is None and report.row("full") is not None
    assert any("requests failed" in r and "no such budget" in r for r in report.reasons)
    assert asked == 2 * report.questions
    with endpoint(answering) as server:
        resumed = run(server.url, tmp_path, resume=True)
        assert len(server.requests) == report.questions
    assert resumed.valid


def test_answers_of_a_server_that_dies_are_kept(tmp_path: Path) -> None:
    def dying(body: Body, number: int) -> Answer:
        if number >= 10:
            # From now on nothing answers, /v1/models no more than the rest.
            server.down = True
            return error(503, "gone")
        return answering(body, number)

    with endpoint(dying) as server:
        report = run(server.url, tmp_path)
    assert not report.valid and not report.rows
    assert any(r.startswith("stopped:") and "--resume" in r for r in report.reasons)
    kept_answers = sum(
        len(answers) for answers in read_journal(tmp_path / JOURNAL).answers.values()
    )
    assert kept_answers == 10
    with endpoint(answering) as server:
        whole = run(server.url, tmp_path, resume=True)
        assert len(server.requests) == 2 * whole.questions - 10
    assert whole.valid


@dataclass
class Started:
    """The part of a started server that the suite uses."""

    url: str
    log: Path
    process: Popen[bytes]


def test_a_failed_start_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*arguments: object, **more: object) -> NoReturn:
        raise ServerDied("vllm serve ended with 1:\nline upon\nline of log")

    monkeypatch.setattr(module, "serve", dead)
    cases, log = build_cases(MODEL.tokens, [8], ["random"]), tmp_path / "server.log"
    suite = MiniLlavaSuite(MODEL, cases, SCENES, Settings(), log)
    report = evaluate(suite, tmp_path, resume=False, progress=Progress(lambda line: None))
    reason = f"stopped: vllm serve ended with 1 (log: {tmp_path}/server.log)"
    assert not report.valid and report.reasons[-1].startswith(reason)


def test_a_started_server_that_ends_is_reported_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(body: Body, number: int) -> Answer:
        server.down = True
        return error(503, "gone")

    @contextmanager
    def ended(*arguments: object, **more: object) -> Iterator[Started]:
        process = Popen([sys.executable, "-c", "raise SystemExit(7)"])
        process.wait()
        yield Started(server.url, tmp_path / "server.log", process)

    monkeypatch.setattr(module, "serve", ended)
    with endpoint(dying) as server:
        suite = build_suite(["random"], SCENES, Settings(max_in_flight=4, wait=0.01))
        report = evaluate(suite, tmp_path, resume=False, progress=Progress(lambda line: None))
    assert "vllm serve ended with 7" in report.reasons[-1] and "--resume" in report.reasons[-1]


def test_a_server_that_is_down_is_reported_before_any_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        run("http://127.0.0.1:9", tmp_path)


def test_a_server_with_another_model_is_refused(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        wrong = connect(server.url, name="llava")
        with pytest.raises(ConfigError, match="serves m -> serve llava"):
            evaluate(wrong, tmp_path, resume=False, progress=Progress(lambda line: None))
        assert not server.requests


def test_a_server_that_prunes_nothing_makes_the_report_invalid(tmp_path: Path) -> None:
    def whole(body: Body, number: int) -> Answer:
        return reply(body, tokens=144)

    with endpoint(whole) as server:
        report = run(server.url, tmp_path)
    assert not report.valid
    assert "random@8: a prompt has 164 tokens instead of 164 - 136" in report.reasons[0]


def test_the_plan_names_the_server_and_counts_requests() -> None:
    command, count = connect("http://h").plan()
    assert "http://h" in command and count.startswith("2 cases x ")
    started = build_suite(["random"], 1, Settings()).plan()[0]
    assert "--autoprune-requests states" in started and "--autoprune-text-tower" in started


def test_progress_reports_the_remaining_time() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress(lines.append, clock=lambda: now[0])
    progress.begin(100, earlier=20)
    now[0] = 20.0
    progress.advance(40)
    assert lines == ["20 of 100 are recorded already", " 60%  60 of 100, 2/s, 20 s left"]
