"""eval: its cases, and runs of a user's questions on a fake server."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from tests.benchmarks.accuracy.minillava_server import answering, arm, asked, reply
from tests.fake_server import Answer, Body
from tests.offline_search.synthetic import MODELS, completion, endpoint, error
from tests.tables import parametrize_from_file
from tests.test_explain import write_frames, write_video
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import StateError
from vllm_autoprune.evaluation.question_suite import QuestionSuite
from vllm_autoprune.evaluation.run import build_cases
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

Answering = Callable[[Body, int], Answer]
CASES = ("full", "random", "resized", "norm", "cdpruner", "autoprune")
"""What a server is asked for by default, by the arm of the fake server."""


def test_each_state_is_compared_with_its_base_policy(tmp_path: Path) -> None:
    states = ["autoprune", "ablation-quota-4", "visionzip"]
    cases = {case.name: case for case in build_cases(states, [8, 16])}
    per_budget = ("random", "resized", "norm", "cdpruner", *states)
    assert list(cases) == [
        "full",
        *(f"{name}@{k}" for k in (8, 16) for name in per_budget),
    ]
    (said,) = (
        case for case in build_cases(["norm"], ["12.5%"]) if case.label == "norm"
    )
    assert (said.name, said.budget, said.pruning["budget"]) == (
        "norm@12.5%",
        "12.5%",
        "12.5%",
    )
    for name, kind, base in (
        ("autoprune@8", "autoprune", "cdpruner@8"),
        ("ablation-quota-4@8", "found", "cdpruner@8"),
        ("visionzip@8", "found", ""),
    ):
        case = cases[name]
        assert (case.arm, case.base, case.refused) == (kind, base, "")
    # A base policy that is named too has a verdict of its own, in either order.
    for names in (["cen_divprune", "minillava"], ["minillava", "cen_divprune"]):
        cases = {case.name: case for case in build_cases(names, [8])}
        assert cases["cen_divprune@8"].arm == cases["minillava@8"].arm == "found"
        bases = (cases["cen_divprune@8"].base, cases["minillava@8"].base)
        assert bases == ("", "cen_divprune@8")
    arms = {case.label: case.arm for case in build_cases(["all"], [8])}
    assert (arms["norm"], arms["divprune"]) == ("norm", "base"), "a control remains one"
    # The base policy alone has the parameters of the state; a budget that it forbids is refused.
    data = load_state("autoprune").model_dump(mode="json")
    data["base_policy"] = {"name": "fastv", "params": {"layer": 3}}
    data["budget"] |= {"limit": 64}
    (tmp_path / "state.json").write_text(json.dumps(data))
    cases = {
        case.name: case
        for case in build_cases([str(tmp_path / "state.json")], [8, 128])
    }
    alone = cases["fastv@8"].pruning["state"]
    assert isinstance(alone, dict) and alone["base_policy"] == data["base_policy"]
    assert "limit" in cases["autoprune@128"].refused and not cases["fastv@128"].refused


def test_cells_are_dropped_alone_and_before_each_state() -> None:
    cases = {
        case.name: case
        for case in build_cases(["cen_divprune"], ["1/8"], ["flat", "none"])
    }
    added = [name for name in cases if "cells" in name]
    alone = "all but flat cells"
    before = "cen_divprune of all but flat cells@1/8"
    assert added == [alone, "norm of all but flat cells@1/8", before]
    assert (cases[alone].arm, cases[alone].pruning["budget"]) == ("full", "100%")
    assert cases[before].base == "cen_divprune@1/8"
    for name in (alone, before):
        state = PruningState.model_validate(cases[name].pruning["state"])
        assert str(state.cells) == "flat" and state.digest != cases["norm@1/8"].digest
    with pytest.raises(StateError, match=r"--cells: 'flatt' is no rule"):
        build_cases(["norm"], ["1/8"], ["flatt"])


def test_cases_of_videos_have_rules_for_frames_and_fewer_frames_as_control() -> None:
    budgets = ["1/4", "tokens_per_frame:16"]
    cases = {
        case.name: case
        for case in build_cases(["vcast", "divprune"], budgets, frames=30)
    }
    per_budget = ("random", "resized", "norm", "vcast", "divprune")
    # Of how many frames 16 a frame are all tokens is not known.
    assert list(cases) == [
        "full",
        *(f"{name}@1/4" for name in per_budget),
        *(f"{name}@tokens_per_frame:16" for name in per_budget if name != "resized"),
    ]
    fewer = cases["resized@1/4"]
    assert fewer.pruning == {"enabled": False} and fewer.label == "fewer frames"
    assert {case.frames for case in cases.values() if case != fewer} == {
        30
    } and fewer.frames == 8
    for name, budget in (
        ("vcast", "curvature"),
        ("divprune", "uniform"),
        ("random", "uniform"),
    ):
        pruning = cases[f"{name}@1/4"].pruning
        state = PruningState.model_validate(pruning["state"])
        assert state.frames is not None and state.frames.budget == budget
        assert pruning["video_budget"] == "1/4" and "budget" not in pruning
        assert (pruning.get("keep") == "random") == (name == "random")
    assert not any(case.refused for case in cases.values())
    # The largest K comes last: of 30 frames of 576 tokens these are 4,320, 200 and 3,840.
    said = ["1/4", "200", "tokens_per_frame:128"]
    found = [
        case
        for case in build_cases(["vcast"], said, frames=30)
        if case.label == "vcast"
    ]
    assert [case.budget_order[0] for case in found] == [4320, 200, 3840]
    # Without frames the states are as ever, so that older evaluations can be resumed.
    (case,) = (
        case for case in build_cases(["all"], [8]) if case.label == "autoprune-on-evs"
    )
    assert PruningState.model_validate(case.pruning["state"]).frames is None


def test_policies_of_one_name_are_cases_of_their_own(tmp_path: Path) -> None:
    states = []
    for place, (name, layer) in enumerate(
        (("a", 3), ("b", 4), ("b", 5), ("random", 3))
    ):
        data = load_state("autoprune").model_dump(mode="json") | {"name": name}
        data["base_policy"] = {"name": "fastv", "params": {"layer": layer}}
        states.append(tmp_path / f"{place}.json")
        states[-1].write_text(json.dumps(data))
    cases = {case.name: case for case in build_cases([*map(str, states), "fastv"], [8])}
    pruned = {name: case.base for name, case in cases.items() if case.arm == "found"}
    assert pruned.pop("a@8") == "fastv-of-a@8" and pruned.pop("b@8") == "fastv-of-b@8"
    assert pruned.pop("fastv@8") == "" and cases["random@8"].arm == "random"
    assert sorted(name[:-14] for name in pruned) == ["b-", "random-"]
    for case in cases.values():
        if case.base:
            alone = cases[case.base].pruning["state"]
            state = case.pruning["state"]
            assert isinstance(alone, dict) and isinstance(state, dict)
            assert alone["base_policy"] == state["base_policy"]


class Call(NamedTuple):
    """Runs eval on the questions of a folder, into its folder ``out``."""

    folder: Path
    printed: Callable[[], Any]

    def __call__(self, url: str, *words: str) -> int:
        data = str(self.folder / "questions.jsonl")
        out = str(self.folder / "out")
        common = ["--data", data, "--server-url", url, "--budgets", "8", "--out", out]
        return main(["eval", *common, *words])

    def drop_answers(self) -> None:
        """Leave images and questions."""
        path = self.folder / "questions.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        bare = [
            {"image": line["image"], "question": line["question"]} for line in lines
        ]
        path.write_text("\n".join(map(json.dumps, bare)))


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Asks four questions about two images."""
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / name)
    lines = [
        {
            "image": "a.png",
            "question": "Which colour?",
            "answer": "red",
            "category": "colour",
        },
        {"image": "b.png", "question": "Is it red?", "answer": "no", "pair": 1},
        {
            "image": "a.png",
            "question": "Which shape?",
            "answer": "square",
            "category": "shape",
        },
        {"image": "b.png", "question": "Is it blue?", "answer": "yes", "pair": 1},
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Call(tmp_path, capsys.readouterr)


def test_every_case_is_asked_every_question_once(call: Call) -> None:
    with endpoint(answering) as server:
        assert call(server.url, "--dry-run") == 0 and not server.requests
        assert "6 cases x 4 questions: 24 requests" in call.printed().out
        assert call(server.url, "--at-once", "1") == 0
        captured = call.printed()
        assert Counter(map(arm, asked(server.requests))) == dict.fromkeys(CASES, 4)
        # Requests about one image are close to each other.
        parts = [body["messages"][0]["content"][0] for body in asked(server.requests)]
        urls = [part["image_url"]["url"] for part in parts]
        # Those of the unpruned model come first, to be checked.
        assert sum(before != after for before, after in pairwise(urls[4:])) == 1
        assert call(server.url) == 1
        assert "already contains an evaluation -> add --resume" in call.printed().err
        assert call(server.url, "--resume", "--json") == 0
        assert Counter(map(arm, asked(server.requests))) == dict.fromkeys(CASES, 4)
    assert "### K = 8" in captured.out and "A trial run on 2 images" in captured.out
    assert (
        "- autoprune, K = 8: images are too few to decide (at least 6), 0.0"
        in captured.out
    )
    assert "| 24/24 [" in captured.err
    headline = captured.out.splitlines()[2]
    assert captured.err.splitlines()[-1] == headline and headline in (
        (call.folder / "out" / "report.html").read_text()
    )
    report = json.loads(call.printed().out)
    rows = {row["case"]["name"]: row for row in report["rows"]}
    assert set(rows) == {"full", *(f"{name}@8" for name in CASES[1:])}
    assert rows["full"]["benchmarks"] == {
        "colour": 100.0,
        "shape": 100.0,
        "yes/no pairs": 100.0,
    }
    assert (
        rows["random@8"]["all"]["acc"] == 0.0
        and "pruning" not in rows["random@8"]["case"]
    )
    assert rows["random@8"]["to_full"]["logprob"]["value"] == pytest.approx(-2.9)


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


@pytest.mark.parametrize(
    ("refused", "refusal", "message"),
    [
        # Of vLLM, whose param is the modality.
        (("full",), error(400, "At most 0", "video"), ": takes no video (status 400: At most 0)"),
        (("vcast", "norm"), error(400, "all kept -> drop it", "a/video_budget#whole_video"),
         "refuses every state: status 400: all kept"),
    ],
)  # fmt: skip
def test_a_server_of_whose_videos_no_token_is_chosen_is_refused(
    call: Call, refused: tuple[str, ...], refusal: Answer, message: str
) -> None:
    write_video(call.folder / "a.mp4", 12)
    line = {"question": "Which colour?", "answer": "red", "video": "a.mp4"}
    (call.folder / "questions.jsonl").write_text(json.dumps(line))

    def answer(body: Body, number: int) -> Answer:
        return refusal if arm(body) in refused else reply(body)

    words = ("--frames", "8", "--budgets", "1/4", "--state", "vcast")
    with endpoint(answer) as server:
        assert call(server.url, *words) == 1
    assert f"{message} -> serve a model of whose videos" in call.printed().err


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
        if number < len(CASES) + 14:
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


@pytest.mark.parametrize("labelled", [True, False])
def test_the_unpruned_model_answers_first_and_its_answer_is_the_reference(
    call: Call, labelled: bool
) -> None:
    if not labelled:
        call.drop_answers()
        assert call("http://h:1") == 1
        assert (
            "4 of 4 questions have no answer -> add --reference" in call.printed().err
        )
    words = ("--reference", "unpruned")
    assert call("http://h:1", *words, "--dry-run") == 0
    assert "24 requests, and more that decode answers" in call.printed().out
    with endpoint(chatting) as server:
        assert call(server.url, *words, "--json") == 0
        decoded = [body for body in server.requests if body["max_tokens"] > 1]
        # Where nothing is compared with it, another answer is not asked for.
        assert Counter(map(arm, decoded)) == {"full": 4} | (
            {"random": 4} if labelled else {}
        )
        assert Counter(map(arm, asked(server.requests))) == dict.fromkeys(CASES, 4)
        count = len(server.requests)
        assert (
            call("http://h:1", *words, "--resume") == 0
            and len(server.requests) == count
        )
    report = json.loads(call.printed().out.partition("# ")[0])
    rows = {row["case"]["name"]: row for row in report["rows"]}
    assert rows["random@8"]["agreement"]["value"] == 0.0
    assert rows["autoprune@8"]["agreement"]["value"] == 100.0
    accuracy = rows["full"]["accuracy"]
    assert accuracy is None if not labelled else accuracy["value"] == 100.0
    records = map(
        json.loads, (call.folder / "out" / "samples.jsonl").read_text().splitlines()
    )
    texts = {r["question"]: r["text"] for r in records if r.get("case") == "full"}
    assert set(texts.values()) == set(SAID.values())


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
        )  # what the page lacks is asked for
        assert len(server.requests) - count == len(CASES) + 2
    assert (
        "| a.png | Which colour? | red. | blue | the start | -2.90 |"
        in call.printed().out
    )
    assert (call.folder / "out" / "report.html").read_text().count(
        "data:image/jpeg;base64,"
    ) == 2


@pytest.mark.parametrize(
    ("said", "labelled", "message"),
    [
        (
            completion(""),
            False,
            "gives no answer whose tokens can be scored, such as '' -> ask",
        ),
        (
            completion("1"),
            True,
            "is right even with all tokens, of the 4 asked first -> ",
        ),
        (error(400, "no logprobs"), False, "status 400: no logprobs -> serve it with"),
    ],
)
def test_what_no_score_can_come_of_is_refused_before_the_long_run(
    call: Call, said: Answer, labelled: bool, message: str
) -> None:
    def answer(body: Body, number: int) -> Answer:
        if len(body["messages"]) > 1 or body["max_tokens"] == 1:
            return reply(body)
        return said

    if not labelled:
        call.drop_answers()
    with endpoint(answer) as server:
        assert call(server.url, "--reference", "unpruned") == 1
        assert len(server.requests) <= len(CASES) + 8
        assert message in call.printed().err
        # Nothing is left to resume.
        assert not (call.folder / "out" / "samples.jsonl").exists()


def refusing(policy: str) -> Answering:
    """A server that refuses the states upon a base policy."""
    return lambda body, number: (
        error(400, "needs inputs that this model has not")
        if f'"base_policy": {{"name": "{policy}"' in json.dumps(body)
        else answering(body, number)
    )


def test_every_base_policy_is_measured_on_any_server(call: Call) -> None:
    with endpoint(refusing("fastv")) as server:
        assert call(server.url, "--state", "all") == 0
    page = call.printed().out
    assert "| fastv | 8 | status 400: needs inputs that this model has not |" in page
    for policy in BASE_POLICIES.keys() - {"fastv"}:
        state = "autoprune" if policy == "cdpruner" else f"autoprune-on-{policy}"
        assert f"| {policy} | 100.0 |" in page and f"| {state} | 100.0 |" in page
    with endpoint(
        answering
    ) as server:  # another start of it may serve what one refused
        assert call(server.url, "--state", "all", "--resume") == 0
        assert set(Counter(map(arm, asked(server.requests)))) == {
            "fastv",
            "autoprune-on-fastv",
        }
    assert "| fastv | 100.0 |" in call.printed().out


def test_a_server_that_cannot_be_measured_leaves_nothing_to_resume(call: Call) -> None:
    assert call("http://127.0.0.1:9") == 1
    assert "does not answer" in call.printed().err
    with endpoint(refusing("cdpruner")) as server:
        assert call(server.url) == 1
        assert not asked(server.requests)
    message = call.printed().err
    assert (
        "refuses every state: status 400: needs inputs that this model has not -> "
        in message
    )
    assert "-> name states that its model serves" in message
    with endpoint(answering) as server:
        assert call(server.url, "--served-name", "llava") == 1
        assert "serves m -> serve llava" in call.printed().err
        assert call(server.url) == 0


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("a/state#not_allowed", " (status 400: no) -> start it with --autoprune-state NAME"),
        ("mm_processor_kwargs", " (it takes no mm_processor_kwargs of theirs) -> start it"),
        ("a/state#unsupported", ": status 400: no -> --autoprune-requests -> name states"),
        (None, ": status 400: no -> --autoprune-requests -> name states"),
    ],
)  # fmt: skip
def test_why_every_state_is_refused_is_read_of_a_field_and_not_of_the_message(
    call: Call, param: str | None, message: str
) -> None:
    def answer(body: Body, number: int) -> Answer:
        if arm(body) == "full":
            return reply(body)
        return error(400, "no -> --autoprune-requests", param)

    with endpoint(answer) as server:
        assert call(server.url) == 1
    assert f"refuses every state{message}" in call.printed().err


SERVES: dict[str, Any] = {
    "state": "autoprune",
    "digest": load_state("autoprune").digest,
    "requests": "any state",
    "allows": {"level": "states"},
}
START = "-> start it with --autoprune-state NAME --autoprune-requests states"


@pytest.mark.parametrize(
    ("page", "param", "message"),
    [
        ({"state": None}, "", f"serves no state {START}"),
        ({**SERVES, "requests": "their budget", "allows": {"level": "budget"}},
         "", f"lets requests set their budget {START}"),
        # Of vLLM, without --trust-request-mm-kwargs.
        (None, "mm_processor_kwargs", f"(it takes no mm_processor_kwargs of theirs) {START}"),
        (None, "media_io_kwargs", "media_io_kwargs of theirs) -> start it with "),
        (None, "a/budget#not_allowed", f"lets requests choose nothing (status 400: no) {START}"),
    ],
)  # fmt: skip
def test_a_server_whose_requests_may_not_choose_is_refused_by_the_flag_to_give(
    call: Call, page: object, param: str, message: str
) -> None:
    refusal = error(400, "no -> serve with B", param)
    with endpoint(lambda body, number: refusal) as server:
        server.pages["/v1/autoprune"] = (
            None if page is None else (200, json.dumps(page).encode(), {})
        )
        assert call(server.url) == 1
        assert len(server.requests) == (page is None)
    printed = call.printed().err
    assert message in printed and printed.count("\n") == 1
    assert ("--trust" in printed) == (param == "media_io_kwargs")


@pytest.mark.parametrize(
    ("page", "cell", "count"),
    [
        (json.dumps(SERVES), "| autoprune (the server's own) |", 1),
        (json.dumps({**SERVES, "state": "mine", "digest": "0"}),
         "| mine (the server's own) | 0 | was not asked -> name it with --state mine, or", 1),
        ("<html>here is a gateway</html>", "(the server's own)", 0),
        ('{"allows": {"level": 3}}', "(the server's own)", 0),
    ],
)  # fmt: skip
def test_the_servers_own_state_is_marked_or_said_to_be_missing(
    call: Call, page: str, cell: str, count: int
) -> None:
    with endpoint(answering) as server:
        server.pages["/v1/autoprune"] = (200, page.encode(), {})
        assert call(server.url) == 0
        assert call("http://h:1", "--resume") == 0  # nothing is left to ask
    printed = call.printed()
    assert printed.out.count(cell) == 2 * count
    assert ("no row is marked as its own state -> start it with " in printed.err) == (
        count == 0
    )


@parametrize_from_file("call", "message")
def test_a_run_that_cannot_start_says_why(
    call: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *call.split()]) == 1
    assert message in capsys.readouterr().err
