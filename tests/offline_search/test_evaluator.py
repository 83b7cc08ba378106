"""Data of a search, and the evaluator that asks servers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offline_search.dataset import SPLITS, Dataset, convert_mme, read_dataset
from offline_search.default_state import find_default_state
from offline_search.evaluator import EvaluationJob, ServedEvaluator
from offline_search.image_facts import describe_facts
from tests.fake_server import Answer, Body, FakeServer
from tests.offline_search.synthetic import (
    MODELS,
    PIXEL,
    answer_search,
    completion,
    endpoint,
    error,
    model_list,
    settings_of,
    token,
)
from tests.tables import parametrize_from_file
from vllm_autoprune import load_state
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import ConfigError, EvaluationFailed, SearchError
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.tpdsl.atoms.source import BudgetCall

MINILLAVA = Path(__file__).parents[2] / "benchmarks/yardsticks/weights/minillava/llava"


@pytest.mark.parametrize(
    ("model", "architecture", "name"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", "", "Qwen3VLForConditionalGeneration"),
        ("llava-hf/llava-1.5-7b-hf", "", "LlavaForConditionalGeneration"),
        (str(MINILLAVA), "", "LlavaForConditionalGeneration"),
        ("mine", "Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        ("mine", "", ""),
        ("Qwen/Qwen3-VL-9B-Instruct", "NoSuchModel", ""),
    ],
)
def test_the_default_state_is_that_of_the_served_family(
    model: str, architecture: str, name: str
) -> None:
    expected = BACKBONES[name].state if name else ""
    assert find_default_state(model, architecture) == expected


# ---- dataset ----


def test_splits_are_shuffled_by_image_and_cut_by_image(data: Dataset) -> None:
    read = read_dataset(data.folder, seed=1)
    assert read.splits["search"] != data.splits["search"]
    assert sorted(map(repr, read.splits["search"])) == sorted(
        map(repr, data.splits["search"])
    )
    images = [example.image for example in read.splits["search"]]
    assert images[::2] == images[1::2], "questions of an image stay together"
    few = read_dataset(data.folder, seed=1, limit=2)
    assert list(few.splits["search"]) == list(read.splits["search"])[:4]
    assert few.digest != read.digest == read_dataset(data.folder, seed=1).digest
    # Questions of an image need not be neighbours.
    path = data.folder / "search.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[::2], *lines[1::2]]))
    assert (
        read_dataset(data.folder, seed=1, limit=2).splits["search"]
        == few.splits["search"]
    )


def test_one_file_is_split_by_image_with_each_category_in_proportion(
    tmp_path: Path,
) -> None:
    path = tmp_path / "questions.jsonl"
    lines = list[str]()
    for number in range(47):
        (tmp_path / f"{number}.png").write_bytes(PIXEL + str(number).encode())
        line = {
            "image": f"{number}.png",
            "answer": "yes",
            "category": "abc"[number % 13 % 3],
        }
        lines += [
            json.dumps({**line, "question": f"Is it {n}?"})
            for n in range(1 + number % 3)
        ]
    path.write_text("\n".join(lines))
    data = read_dataset(path, seed=3)
    images = {
        split: {e.image: e.category for e in data.splits[split]} for split in SPLITS
    }
    assert sum(map(len, images.values())) == len(data.images) == 47, (
        "no image in two splits"
    )
    assert sum(map(len, data.splits.values())) == len(lines)
    for category, count in Counter("abc"[n % 13 % 3] for n in range(47)).items():
        for split, share in zip(SPLITS, (0.5, 0.2, 0.3), strict=True):
            of_split = [*images[split].values()].count(category)
            assert abs(of_split - share * count) <= 1
    assert (
        f"with seed 3: {len(data.splits['search'])} questions about 24 images for"
        in data.note
    )
    assert (
        data.note.count("; ") == 3 and read_dataset(path, seed=4).digest != data.digest
    )
    path.write_text("\n".join(reversed(lines)))
    again = read_dataset(path, seed=3).splits
    assert all(
        {e.image for e in again[split]} == images[split].keys() for split in SPLITS
    )

    path.write_text("\n".join(lines[:10]))
    with pytest.raises(
        ConfigError, match=r"has 6 images, .* at least 10 images: 5 for search"
    ):
        read_dataset(path)
    path.unlink()
    with pytest.raises(
        ConfigError, match=r"file of questions, or a folder with search\.jsonl"
    ):
        read_dataset(path)


def test_mme_files_of_both_layouts_become_a_data_folder_or_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MME has images in two of existence, count, position and color: each is in one split."""
    mme = tmp_path / "mme"
    for name in ("color", "position", "scene"):
        texts = mme / name / "questions_answers_YN"
        images = mme / name / "images"
        if name != "scene":
            texts = images = mme / name
        for number in range(4 if name == "position" else 10):
            texts.mkdir(parents=True, exist_ok=True)
            images.mkdir(exist_ok=True)
            (texts / f"{number}.txt").write_text(
                f"Is it {name}?\tYes\nIs it not?\tNo\n"
            )
            content = PIXEL + f"{name.replace('position', 'color')} {number}".encode()
            (images / f"{number}.jpg").write_bytes(content)
    flags = ["--mme", str(mme), "--data", str(tmp_path / "data"), "--json"]
    assert main(["search", "mme", *flags]) == 0
    counts = json.loads(capsys.readouterr().out)
    data = read_dataset(tmp_path / "data")  # raises for an image in two splits
    assert counts == {split: len(data.splits[split]) for split in SPLITS}
    assert counts["search"] >= 20 and counts["validation"] >= 8 and counts["test"] >= 12
    examples = [example for split in SPLITS for example in data.splits[split]]
    assert Counter(example.pair for example in examples) == dict.fromkeys(range(24), 2)
    assert Counter(example.category for example in examples) == {
        "color": 20,
        "position": 8,
        "scene": 20,
    }

    (mme / "color" / "1.txt").write_text("Is it red?\tYes\nIs it blue?\t\n")
    (mme / "color" / "5.jpg").unlink()
    with pytest.raises(ConfigError) as caught:
        convert_mme(mme, tmp_path / "refused")
    assert {Path(p.where).name for p in caught.value.problems} == {"1.txt:2", "5.txt"}
    for problem in ("cannot be read", "has no picture"):
        with pytest.raises(ConfigError, match=problem):
            convert_mme(tmp_path / "few", tmp_path / "refused")
        (tmp_path / "few").mkdir(exist_ok=True)
    assert not (tmp_path / "refused").exists()


# ---- the evaluator on servers; its client has tests of its own ----

STATE = load_state("visionzip")
SINGLE = EvaluationJob(STATE, 8, "search", 0, 1)


def prompt(*answer: dict[str, Any]) -> Answer:
    before = [None, token("USER:", -3.0, 5), token(" ASSISTANT:", -2.0, 7)]
    return completion(".", prompt_logprobs=[*before, *answer])


def echo_answer(body: Body, number: int, rank: int = 1) -> Answer:
    """Echoes the reference answer as two tokens, the second of this rank."""
    answer = body["messages"][-1]["content"]
    return prompt(token(f" {answer[0]}", -0.25), token(answer[1:], -0.5 * rank, rank))


async def evaluate(servers: list[FakeServer], data: Dataset, job: EvaluationJob) -> Any:
    urls = [server.url for server in servers] or ["http://127.0.0.1:9"]
    evaluator = ServedEvaluator(urls, data, model="m", first_wait=0.01)
    try:
        return await evaluator.evaluate(job)
    finally:
        await evaluator.close()


async def test_the_reference_answer_is_scored_at_the_end_of_the_prompt(
    data: Dataset,
) -> None:
    with endpoint(echo_answer) as server:
        answers = await evaluate(
            [server], data, EvaluationJob(STATE, 8, "search", 0, 4)
        )
        assert answers.logprob == (-0.75,) * 4 and answers.right == (True,) * 4
        body = server.requests[0]
        await evaluate([server], data, EvaluationJob(None, 0, "search", 0, 1))
    pruning = body["mm_processor_kwargs"]["autoprune"]
    assert pruning["budget"] == 8
    assert load_state(json.dumps(pruning["state"])).digest == STATE.digest
    assert body["messages"][0]["content"][0]["image_url"]["url"].startswith(
        "data:image/png;base64"
    )
    questions = {body["messages"][0]["content"][1]["text"] for body in server.requests}
    assert questions == {example.question for example in data.splits["search"][:4]}
    assert server.requests[-1]["mm_processor_kwargs"] == {
        "autoprune": {"enabled": False}
    }
    with endpoint(lambda body, number: echo_answer(body, number, rank=2)) as server:
        answers = await evaluate([server], data, SINGLE)
    assert answers.right == (False,), "greedy decoding would not give it"
    assert answers.logprob == (-1.25,)


async def test_a_failed_request_is_an_error_and_not_a_wrong_answer(
    data: Dataset,
) -> None:
    with endpoint(lambda b, n: error(503)) as server:
        with pytest.raises(EvaluationFailed, match="after 4 attempts"):
            await evaluate([server], data, SINGLE)
        server.respond = lambda body: error(400, "no states")
        with pytest.raises(EvaluationFailed, match="no states"):
            await evaluate([server], data, SINGLE)
    with pytest.raises(SearchError, match="start it and resume") as caught:
        await evaluate([], data, SINGLE)
    assert not isinstance(caught.value, EvaluationFailed), (
        "it is not the candidate's fault"
    )


async def test_servers_share_the_images_and_replace_a_broken_server(
    data: Dataset,
) -> None:
    job = EvaluationJob(STATE, 8, "search", 0, len(data.splits["search"]))
    with endpoint(echo_answer) as server, endpoint(echo_answer) as other:
        answers = await evaluate([server, other], data, job)
        assert len(answers) == len(server.requests) + len(other.requests)
        images = [
            {b["messages"][0]["content"][0]["image_url"]["url"] for b in each.requests}
            for each in (server, other)
        ]
        assert images[0] and images[1] and not images[0] & images[1]
    with endpoint(echo_answer) as server, endpoint(lambda b, n: error(500)) as broken:
        assert len(await evaluate([server, broken], data, job)) == len(server.requests)


async def check(
    urls: list[str], data: Dataset, model: str | None = None
) -> list[tuple[str, str]]:
    """What is wrong with servers, and how to fix it."""
    evaluator = ServedEvaluator(urls, data, model=model, first_wait=0.01)
    with pytest.raises(ConfigError) as caught:
        await evaluator.prepare()
    await evaluator.close()
    return [(problem.what, problem.fix) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("answer", "what", "fix"),
    [
        (
            completion(".", prompt_logprobs=["x"]),
            "answers without the log-probabilities of the prompt",
            "the address of a vllm serve",
        ),
        (error(400, "none"), "status 400: none", "--autoprune-requests states"),
        (
            error(400, "no -> serve with B", "a#not_allowed"),
            "status 400: no",
            "start it with --autoprune-state NAME --autoprune-requests states",
        ),
        # What a message says decides nothing.
        (
            error(400, "no --autoprune-requests -> give one", "a#unsupported"),
            "status 400: no --autoprune-requests",
            "give one",
        ),
        (prompt(token(" other", -0.1)), "not in the reference answer", "chat template"),
    ],
)
async def test_an_odd_server_is_reported_with_its_fix(
    answer: Answer, what: str, fix: str, data: Dataset
) -> None:
    with endpoint(lambda b, n: answer) as server:
        ((reported, advice),) = await check([server.url], data)
    assert what in reported and fix in advice


async def test_all_servers_are_checked_and_serve_the_named_model(data: Dataset) -> None:
    ((what, _),) = await check(["http://127.0.0.1:9"], data)
    assert "does not answer" in what
    with endpoint(echo_answer) as server, endpoint(echo_answer) as other:
        server.pages[MODELS], other.pages[MODELS] = (
            model_list("a", "c"),
            model_list("b", "c"),
        )
        urls = [server.url, other.url]
        ((what, fix),) = await check(urls, data, "a")
        assert what == "serves b, c, not a" and "--server-model" in fix
        evaluator = ServedEvaluator(urls, data, model="c")
        await evaluator.prepare()
        await evaluator.close()
        assert evaluator.name == f"c through vLLM, data {data.digest[:12]}"
        assert {body["model"] for body in other.requests} == {"c"}
    with (
        endpoint(lambda b, n: error(400, "no")) as refusing,
        endpoint(echo_answer) as broken,
    ):
        broken.pages[MODELS] = error(500)
        problems = await check([broken.url, refusing.url], data)
    assert [what for what, _ in problems] == [
        "answers with status 500: no",
        "status 400: no",
    ]


async def test_servers_of_several_models_are_each_asked_every_question(
    data: Dataset,
) -> None:
    """Two servers of one model divide its questions."""
    pages = [model_list("a", "x"), model_list("x", "a"), model_list("b")]
    with (
        endpoint(answer_search) as single,
        endpoint(answer_search) as twin,
        endpoint(answer_search) as other,
    ):
        servers = [single, twin, other]
        for server, page in zip(servers, pages, strict=True):
            server.pages[MODELS] = page
        other.pages["/v1/autoprune"] = (200, b'{"sign": -1, "unavailable": []}', {})
        evaluator = ServedEvaluator([server.url for server in servers], data)
        await evaluator.prepare()
        assert evaluator.models == ("a", "b")
        for server in servers:
            server.requests.clear()
        count = len(data.splits["search"])
        await evaluator.evaluate(EvaluationJob(STATE, 8, "search", 0, 2 * count))
        asked = [{body["model"] for body in server.requests} for server in servers]
        assert asked == [{"a"}, {"a"}, {"b"}] and len(other.requests) == count
        with pytest.raises(ConfigError, match="an image has 64 on a"):
            await evaluator.check_budget(64)
        await evaluator.read_image_facts()
        await evaluator.close()
    assert evaluator.name.startswith("a and b through vLLM, data ")
    assert evaluator.image_facts["a"].sign is None
    text = describe_facts(evaluator.image_facts, settings_of(budgets=("1/8",)))
    assert "b: An image has N = 64 tokens, of which K = 8 are kept. With" in text
    assert text.endswith('The sign "auto" is "-".\n\n')
    assert evaluator.find_default_state() == ""


@parametrize_from_file("page", "facts")
async def test_what_a_server_knows_of_its_images_is_told_without_a_checkpoint(
    page: dict[str, Any] | None, facts: str, data: Dataset
) -> None:
    with endpoint(answer_search) as server:
        if page is not None:
            server.pages["/v1/autoprune"] = (200, json.dumps(page).encode(), {})
        evaluator = ServedEvaluator([server.url], data, model="m")
        await evaluator.read_image_facts()
        await evaluator.close()
    read = evaluator.image_facts[""]
    assert facts in read.describe(BudgetCall.parse(8)) and read.counts == (64,)
