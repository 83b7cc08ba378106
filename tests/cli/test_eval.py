"""Runs of eval: a user's questions on a fake server."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tests.benchmarks.accuracy.minillava_server import (
    answering,
    arm,
    asked,
    pruning_of,
    reply,
)
from tests.cli.evaluations import CASES, Call
from tests.fake_server import Answer, Body
from tests.offline_search.synthetic import MODELS, completion, endpoint, error
from tests.tables import parametrize_from_file
from tests.videos import write_frames, write_video
from vllm_autoprune import load_state
from vllm_autoprune.evaluation.question_suite import QuestionSuite


def test_every_case_is_asked_every_question_once(call: Call) -> None:
    with endpoint(answering) as server:
        assert call(server.url, "--dry-run") == 0 and not server.requests
        assert "6 cases x 4 questions: 24 requests" in call.printed().out
        assert call(server.url, "--at-once", "1") == 0
        assert "| 24/24 [" in call.printed().err
        assert Counter(map(arm, asked(server.requests))) == dict.fromkeys(CASES, 4)
        # Requests about one image are close to each other.
        parts = [body["messages"][0]["content"][0] for body in asked(server.requests)]
        urls = [part["image_url"]["url"] for part in parts]
        # Those of the unpruned model come first, to be checked.
        assert sum(before != after for before, after in pairwise(urls[4:])) == 1


@pytest.mark.parametrize("name", ["trim", "mine"])
def test_without_a_name_the_servers_own_state_is_measured_at_its_own_budget(
    call: Call, name: str
) -> None:
    shipped = {"trim": load_state("trim").digest}
    page = {"state": name, "digest": shipped.get(name, "0"), "budget": {"k": 16}}
    with endpoint(lambda body, number: reply(body)) as server:
        server.pages["/v1/autoprune"] = (200, json.dumps(page).encode(), {})
        assert call.own(server.url) == 0
        pruned = [pruning_of(body) for body in asked(server.requests)]
    assert {options["budget"] for options in pruned if "enabled" not in options} == {16}
    assert ({"budget": 16} in pruned) == (name == "mine")
    answer = call.printed().err.splitlines()[-1]
    assert f": {name} at K = 16 answers 100.0 % of the questions right" in answer


def test_a_state_is_measured_on_questions_that_did_not_choose_it_or_says_so(
    call: Call,
) -> None:
    digest = hashlib.sha256((call.folder / "a.png").read_bytes()).hexdigest()
    document = load_state("autoprune").model_dump(mode="json") | {"name": "found"}
    document["provenance"]["chosen_by"] = f"00000000 {digest[:8]}"
    path = call.folder / "found.json"
    path.write_text(json.dumps(document))
    words = ("--state", str(path))
    with endpoint(lambda body, number: reply(body)) as server:
        assert call(server.url, *words) == 0
        assert Counter(map(arm, asked(server.requests)))["found"] == 2
        printed = call.printed()
        assert "; 2 questions that chose a state are left out." in printed.err
        said = "2 further questions are left out, because a search chose found by their"
        assert f"- {said} images (--all-questions keeps them)" in printed.out
        everything = ("--all-questions", "-o", str(call.folder / "everything"))
        assert call(server.url, *words, *everything) == 0
    printed = call.printed()
    mark = "(chosen by 2 of these questions, which flatter it)"
    assert f": found at K = 8 {mark} answers 100.0 %" in printed.err
    assert f"| found {mark} | 100.0 |" in printed.out and "left out" not in printed.out


def test_an_evaluation_is_repeated_only_where_that_is_asked_for(call: Call) -> None:
    with endpoint(answering) as server:
        assert call(server.url) == 0
        assert call(server.url) == 1
        assert "already contains an evaluation -> add --resume" in call.printed().err
        assert call(server.url, "--resume") == 0
        assert Counter(map(arm, asked(server.requests))) == dict.fromkeys(CASES, 4)


def test_the_page_of_an_evaluation_begins_with_its_last_line(call: Call) -> None:
    with endpoint(answering) as server:
        assert call(server.url) == 0
    captured = call.printed()
    headline = captured.out.splitlines()[2]
    assert captured.err.splitlines()[-1] == headline
    assert headline in (call.folder / "out" / "report.html").read_text()
    assert "### K = 8" in captured.out and "A trial run on 2 images" in captured.out
    few = "- autoprune, K = 8: images are too few to decide (at least 6), 0.0"
    assert few in captured.out


def test_the_record_of_an_evaluation_has_a_row_for_each_case(call: Call) -> None:
    with endpoint(answering) as server:
        assert call(server.url, "--json") == 0
    report = json.loads(call.printed().out)
    rows = {row["case"]["name"]: row for row in report["rows"]}
    assert set(rows) == {"full", *(f"{name}@8" for name in CASES[1:])}
    scores = {"colour": 100.0, "shape": 100.0, "yes/no pairs": 100.0}
    assert rows["full"]["benchmarks"] == scores
    assert rows["random@8"]["all"]["acc"] == 0.0
    assert "pruning" not in rows["random@8"]["case"]
    assert rows["random@8"]["to_full"]["logprob"]["value"] == pytest.approx(-2.9)


def test_the_record_of_an_answer_has_its_text(call: Call) -> None:
    """A wrong one is decoded in addition, in at most 64 tokens."""

    def answer(body: Body, number: int) -> Answer:
        is_wrong = arm(body) == "random"
        decodes = is_wrong and body["max_tokens"] > 1
        return reply(body, right=not is_wrong, following="blue" if decodes else "")

    with endpoint(answer) as server:
        assert call(server.url) == 0
        decoded = [body for body in server.requests if body["max_tokens"] > 1]
    assert Counter(map(arm, decoded)) == {"random": 4}
    assert {body["max_tokens"] for body in decoded} == {64}
    lines = (call.folder / "out" / "samples.jsonl").read_text().splitlines()
    texts: dict[str, list[str]] = {}
    for record in map(json.loads, lines):
        if record["kind"] == "answer":
            texts.setdefault(record["case"], []).append(record["text"])
    assert texts["random@8"] == ["blue"] * 4
    assert sorted(texts["full"]) == ["no", "red", "square", "yes"]


def test_videos_are_asked_about_with_as_many_frames_as_a_case_has(call: Call) -> None:
    video = write_video(call.folder / "a.mp4", 12)
    files = sorted(write_frames(call.folder / "frames", 12).iterdir())
    line = {"question": "Which colour?", "answer": "red"}
    lines = [json.dumps({**line, "video": name}) for name in ("a.mp4", "frames")]
    (call.folder / "questions.jsonl").write_text("\n".join(lines))
    assert call("http://h:1") == 1
    assert (
        call.printed().err.count(
            "asks about a video -> add --frames 32, or leave it out"
        )
        == 2
    )
    assert (
        call("http://h:1", "--frames", "12") == 1
    )  # vLLM samples a file again if it has no more
    assert (
        call.printed().err.count(
            " 11 frames can be sampled -> give --frames 11 or fewer"
        )
        == 1
    )

    def sampled(body: Body) -> int:
        return int(body["media_io_kwargs"]["video"]["num_frames"])

    def answer(body: Body, number: int) -> Answer:
        tokens = 18 * (sampled(body) if arm(body) == "full" else 2)
        return reply(body, right=arm(body) != "random", tokens=tokens)

    with endpoint(answer) as server:
        words = ("--frames", "8", "--budgets", "1/4", "--state", "vcast")
        assert call(server.url, *words) == 0
        sent = asked(server.requests)
    contents = [
        base64.b64encode(file.read_bytes()).decode() for file in (video, *files)
    ]
    frames = {2: (0, 11), 8: (0, 1, 3, 4, 6, 7, 9, 11)}
    expected = [
        (name, count, url)
        for name, count in (
            ("full", 8),
            ("full", 2),
            ("random", 8),
            ("norm", 8),
            ("vcast", 8),
        )
        for url in (
            f"data:video/mp4;base64,{contents[0]}",
            f"data:video/jpeg;base64,{','.join(contents[1 + i] for i in frames[count])}",
        )
    ]
    urls = [body["messages"][0]["content"][0]["video_url"]["url"] for body in sent]
    assert sorted(expected) == sorted(
        zip(map(arm, sent), map(sampled, sent), urls, strict=True)
    )
    page = call.printed().out
    assert (
        "Pruning or sampling fewer frames?" in page
        and "% right less fewer frames" in page
    )


def test_only_what_has_no_answer_is_asked_again(call: Call) -> None:
    def failing(body: Body, number: int) -> Answer:
        return error(400, "no") if number == len(CASES) + 3 else answering(body, number)

    with endpoint(failing) as server:
        assert call(server.url) == 1
    printed = call.printed().out
    assert (
        "Not valid: " in printed and "1 of 4 requests failed: status 400: no" in printed
    )
    path = call.folder / "out" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # a killed process leaves half a line
    with endpoint(answering) as server:
        assert call(server.url, "--resume") == 0
        assert len(asked(server.requests)) == 2
    questions = call.folder / "questions.jsonl"
    questions.write_text(questions.read_text().replace("Which shape?", "What is it?"))
    assert call("http://h:1", "--resume") == 1
    assert (
        "another evaluation (setup : data differ) -> name another" in call.printed().err
    )


def test_answers_of_a_server_that_dies_are_kept(call: Call) -> None:
    def dying(body: Body, number: int) -> Answer:
        if number < len(CASES) + 16:  # 14 answers, of which 2 wrong ones are decoded
            return answering(body, number)
        server.pages[MODELS] = error(503, "down")
        return error(503, "gone")

    with endpoint(dying) as server:
        assert call(server.url, "--at-once", "1") == 1
    with endpoint(answering) as server:
        assert call(server.url, "--resume") == 0
        assert len(asked(server.requests)) == 10
    printed = call.printed()
    assert "stopped: " in printed.out and "| 10/10 [" in printed.err


def test_an_interrupted_evaluation_says_how_to_go_on(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*values: object) -> None:
        raise KeyboardInterrupt

    with endpoint(answering) as server:
        for more in ([], ["--resume"]):
            with monkeypatch.context() as patch:
                patch.setattr(QuestionSuite, "_ask", interrupt)
                assert call(server.url, *more) == 130
            path = call.folder / "out" / "samples.jsonl"
            line = (
                f"stopped; {path} keeps what was measured, --resume goes on from it\n"
            )
            _, _, command = call.printed().err.partition(line)
            assert command.startswith("vllm-autoprune eval ") and command.endswith(
                "--resume\n"
            )
        assert call(server.url, "--resume") == 0


@parametrize_from_file("random", "status", "reason")
def test_an_answer_that_goes_on_is_wrong_and_a_prompt_that_is_not_pruned_is_told(
    call: Call, random: dict[str, Any], status: int, reason: str
) -> None:
    def answer(body: Body, number: int) -> Answer:
        return reply(body, **random if arm(body) == "random" else {"following": "."})

    with endpoint(answer) as server:
        assert call(server.url, "--json") == status
    report = json.loads(call.printed().out)
    (row,) = [row for row in report["rows"] if row["case"]["name"] == "random@8"]
    assert row["all"]["acc"] == 100.0 * status and reason in " ".join(report["reasons"])


SAID = {
    "Which colour?": "red.",
    "Is it red?": "no",
    "Which shape?": "square",
    "Is it blue?": "yes",
}
"""What the unpruned model answers: the labels, or a label in other form."""


def chatting(body: Body, number: int) -> Answer:
    """As :func:`answering`; what is not scored is answered, with random tokens by "blue"."""
    asked, *scored = body["messages"]
    answer = SAID.get(asked["content"][-1]["text"], "?")
    if not scored:
        return completion("blue" if arm(body) == "random" else answer)
    assert scored[-1]["content"] == answer
    return answering(body, number)


def test_questions_without_labels_need_a_reference(call: Call) -> None:
    call.drop_answers()
    assert call("http://h:1") == 1
    assert "4 of 4 questions have no answer -> add --reference" in call.printed().err
    words = ("--reference", "unpruned")
    assert call("http://h:1", *words, "--dry-run") == 0
    assert "24 requests, and another that decodes it for" in call.printed().out


@pytest.mark.parametrize("labelled", [True, False])
def test_the_unpruned_model_answers_first_and_its_answer_is_the_reference(
    call: Call, labelled: bool
) -> None:
    if not labelled:
        call.drop_answers()
    with endpoint(chatting) as server:
        assert call(server.url, "--reference", "unpruned", "--json") == 0
        decoded = [body for body in server.requests if body["max_tokens"] > 1]
        # What agrees with it is not decoded again.
        assert Counter(map(arm, decoded)) == {"full": 4, "random": 4}
        assert Counter(map(arm, asked(server.requests))) == dict.fromkeys(CASES, 4)
    report = json.loads(call.printed().out)
    rows = {row["case"]["name"]: row for row in report["rows"]}
    assert rows["random@8"]["agreement"]["value"] == 0.0
    assert rows["autoprune@8"]["agreement"]["value"] == 100.0
    accuracy = rows["full"]["accuracy"]
    assert accuracy is None if not labelled else accuracy["value"] == 100.0
    lines = (call.folder / "out" / "samples.jsonl").read_text().splitlines()
    texts = {r["text"] for r in map(json.loads, lines) if r.get("case") == "full"}
    assert texts == set(SAID.values())


def test_answers_of_the_unpruned_model_are_not_asked_for_again(call: Call) -> None:
    words = ("--reference", "unpruned")
    with endpoint(chatting) as server:
        assert call(server.url, *words) == 0
        count = len(server.requests)
        assert call("http://h:1", *words, "--resume") == 0
        assert len(server.requests) == count


def test_answers_that_changed_most_are_asked_for_and_shown_with_their_pictures(
    call: Call,
) -> None:
    call.drop_answers()
    words = ("--reference", "unpruned")
    failing = [True]

    def pruned(body: Body, number: int) -> Answer:
        if len(body["messages"]) > 1:
            return reply(body, right=arm(body) == "full")
        if failing and body["max_tokens"] > 1 and arm(body) != "full":
            return error(400, "no")
        return chatting(body, number) if arm(body) == "full" else completion("blue")

    with endpoint(pruned) as server:
        assert call(server.url, *words) == 0
        assert "| a.png | Which colour? | red. | - |" in call.printed().out
        failing.clear()
        count = len(server.requests)
        assert (
            call(server.url, *words, "--resume") == 0
        )  # what has no text is scored and decoded again
        assert len(server.requests) - count == len(CASES) + 2 * 4 * (len(CASES) - 1)
    assert (
        "| a.png | Which colour? | red. | blue | the start | -2.90 |"
        in call.printed().out
    )
    assert (call.folder / "out" / "report.html").read_text().count(
        "data:image/jpeg;base64,"
    ) == 2
