"""`python -m benchmarks.accuracy.minillava`: accuracy of every case of the paper on mini-LLaVA.

One server, to which every request brings the state of its case. Requests are ordered by scene,
question and case, so that all requests about an image are close to each other and its vision
features are computed once. The residual of the shipped state ``autoprune`` is applied to each base
policy without tuning; the values of q_e and the search result are shipped states too.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from benchmarks.policies import QUOTAS, SEARCH_RESULTS
from benchmarks.server import ServerDied, command, serve
from benchmarks.yardsticks.examples import CHECKPOINTS, draw_examples, png_url, weights_digest
from benchmarks.yardsticks.minillava import MiniLlava
from vllm_autoprune.cli.commands.eval import add_run_arguments, run_suite
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError, ConfigError, Problem
from vllm_autoprune.evaluation.journal import MME, Case, Contents, EvaluationError, Question
from vllm_autoprune.evaluation.questions import PreparedQuestion
from vllm_autoprune.evaluation.run import (
    FULL,
    SOURCE,
    Progress,
    QuestionSuite,
    Settings,
    control_case,
    prune_case,
    residual_on,
)
from vllm_autoprune.http_client import MAX_IN_FLIGHT
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state

EMBEDDED = "embedded"
_REQUESTS = 60_000
"""Requests for the default number of scenes: half an hour at 35 requests per second."""
_QUESTIONS_PER_SCENE = 18
"""Approximately; scenes without signs have fewer."""


def find_model(name: str) -> Path:
    """The folder of the model ``embedded``, or a folder; raises :class:`ConfigError`."""
    folder = CHECKPOINTS["minillava"] if name == EMBEDDED else Path(name)
    for part in ("llava/config.json", "clip/config.json"):
        if not (folder / part).is_file():
            fix = f"use {EMBEDDED}, or a folder with llava/ and clip/"
            raise ConfigError("eval", [Problem(f"--model {name}", f"has no {part}", fix)])
    return folder


def count_tokens(folder: Path) -> int:
    """N, the number of visual tokens of an image."""
    config = json.loads((folder / "llava" / "config.json").read_text())
    return int(config["image_seq_length"])


def prepare_questions(scenes: int) -> Sequence[PreparedQuestion]:
    """The questions about the first scenes of the test split, scene by scene."""
    questions, images = [], dict[int, str]()
    for number, example in enumerate(draw_examples("test", scenes)):
        if example.image_id not in images:
            images[example.image_id] = png_url(example.image)
        paired = example.pair is not None
        record = Question(
            id=str(number),
            benchmark=MME if paired else example.kind,
            image=str(example.image_id),
            category=example.kind if paired else "",
            pair=str(example.pair) if paired else "",
        )
        image = images[example.image_id]
        questions.append(PreparedQuestion(record, example.question, example.answer, image))
    return questions


Family = Literal["random", "resized", "policies", "found", "quota"]
FAMILIES: tuple[Family, ...] = get_args(Family)
"""Families of cases that can be measured beside the full model; by default all of them."""

BUDGETS = (64, 32, 16, 8, 4)


def build_cases(tokens: int, budgets: Sequence[int], families: Sequence[Family]) -> list[Case]:
    """All cases, the full model first; raises :class:`ConfigError` for budgets outside 1..N-1."""
    wrong = [budget for budget in budgets if not 0 < budget < tokens]
    if wrong:
        what, fix = f"are not within 1..{tokens - 1}", f"an image has N = {tokens} tokens"
        values = " ".join(map(str, wrong))
        raise ConfigError("eval", [Problem(f"--budgets {values}", what, fix)])
    return [FULL, *(case for budget in budgets for case in _cases_at(budget, families))]


def _cases_at(budget: int, families: Sequence[Family]) -> Iterator[Case]:
    """The cases of one K, in the order of the tables."""
    if "random" in families:
        yield control_case("random", budget)
    if "resized" in families:
        yield control_case("resized", budget)
    policies = [load_state(SOURCE).base_policy.name] if {"found", "quota"} & set(families) else []
    if "policies" in families:
        policies = [policy for policy in BASE_POLICIES if policy not in MiniLlava.equal_policies]
    for policy in policies:  # the other families are compared with the shipped state and its base
        base = f"{policy}@{budget}"
        yield prune_case(base, "base", policy, load_state(policy), budget)
        name, label = f"{policy}+{SOURCE}@{budget}", f"{policy} + AutoPrune"
        yield prune_case(name, "autoprune", label, residual_on(policy), budget, base)
    for name, searched_on in SEARCH_RESULTS.items():
        if "found" in families and searched_on == "mini-LLaVA":
            state = load_state(name)
            policy = state.base_policy.name
            label = f"{policy} + what a search found{', with a core' if state.core else ''}"
            yield prune_case(
                f"{name}@{budget}", "found", label, state, budget, f"{policy}@{budget}"
            )
    for quota in QUOTAS:
        if "quota" in families and quota <= budget:
            state = load_state(f"ablation-quota-{quota}")
            base, name = f"{state.base_policy.name}@{budget}", f"quota-{quota}@{budget}"
            yield prune_case(name, "quota", f"q_e = {quota}", state, budget, base)


_FLAGS = (
    "--enforce-eager", "--max-model-len", "512", "--block-size", "32",
    "--autoprune-state", "cdpruner", "--autoprune-requests", "states",
)  # fmt: skip

_START_TIMEOUT = 1200.0
"""Seconds; a start takes ten on an idle machine, but many minutes on a busy one."""


class MiniLlavaSuite(QuestionSuite):
    """The questions about a number of scenes, answered in every case."""

    def __init__(
        self,
        folder: Path,
        cases: Sequence[Case],
        scenes: int | None,
        settings: Settings,
        log: Path | None = None,
    ) -> None:
        """``scenes``: None for as many as take about half an hour; ``log`` is a started server's.

        Without the address of a server in the settings, one is started.
        """
        scenes = scenes or max(8, _REQUESTS // (max(len(cases), 1) * _QUESTIONS_PER_SCENE))
        self._name = EMBEDDED if folder == CHECKPOINTS["minillava"] else folder.name
        super().__init__(
            prepare_questions(scenes),
            cases,
            settings,
            suite="minillava",
            model=f"mini-LLaVA {self._name}, weights {weights_digest(folder)}",
            data=f"test split, {scenes} scenes",
        )
        self._folder, self._log = folder, log
        self._flags = (*_FLAGS, "--autoprune-text-tower", str(folder / "clip"))

    def describe_server(self) -> str:
        """The address of the server, or the command line that starts one."""
        if self.settings.url:
            return super().describe_server()
        return " ".join(command(self._folder / "llava", 8000, self._flags))

    @contextlib.contextmanager
    def open_server(self, progress: Progress) -> Iterator[str]:
        """The server of the settings, or one that runs while the context is open."""
        if self.settings.url:
            yield self.settings.url
            return
        progress.write(f"starting vllm serve with mini-LLaVA {self._name} ...")
        model, patience = self._folder / "llava", _START_TIMEOUT
        try:
            with serve(model, *self._flags, log=self._log, patience=patience) as server:
                try:
                    yield server.url
                except EvaluationError:
                    status = server.process.poll()
                    if status is None:
                        raise
                    raise EvaluationError(
                        f"vllm serve ended with {status} (log: {server.log}) -> fix that and add "
                        "--resume: nothing is lost"
                    ) from None
        except ServerDied as error:
            what = str(error).split("\n")[0].rstrip(":")
            where = f" (log: {self._log})" if self._log is not None else ""
            raise EvaluationError(f"{what}{where} -> fix that and add --resume") from None

    def objections(self, contents: Contents) -> Iterator[str]:
        """Prompt lengths that do not match K, which shows that a case was not served as asked."""
        tokens = count_tokens(self._folder)
        for case in self.cases:
            removed = tokens - case.budget
            for pruned, unpruned in contents.prompt_lengths(case):
                if pruned != unpruned - removed:
                    yield (
                        f"{case.name}: a prompt has {pruned} tokens instead of {unpruned} - "
                        f"{removed}: the case was not served as asked"
                    )
                    break


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 for a valid report, 1 for one that is not or that cannot be made."""
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.minillava",
        description="Measure accuracy of every base policy, residual and ablation on mini-LLaVA.",
    )
    add, out = parser.add_argument, Path("out/eval/minillava")
    add("--out", type=Path, default=out, metavar="FOLDER", help="folder for the results")
    add("--json", action="store_true", help="print the report as JSON")
    add_run_arguments(parser)
    add("--model", default=EMBEDDED, help="embedded (default), or a folder with llava/ and clip/")
    add("--scenes", type=int, help="default: about half an hour's worth")
    add("--budgets", type=int, nargs="+", default=list(BUDGETS), metavar="K", help="each K")
    text = "groups of cases"
    add("--cases", nargs="+", default=list(FAMILIES), choices=FAMILIES, help=text)
    text = "a running server with --autoprune-requests states; default: one is started"
    add("--server-url", metavar="URL", help=text)
    options = parser.parse_args(arguments)
    try:
        settings = Settings(
            options.server_url or "", options.served_name, options.concurrency or MAX_IN_FLIGHT
        )
        folder = find_model(options.model)
        cases = build_cases(count_tokens(folder), options.budgets, options.cases)
        log = options.out / "server.log"
        suite = MiniLlavaSuite(folder, cases, options.scenes, settings, log)
        return run_suite(suite, options.out, options)
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
