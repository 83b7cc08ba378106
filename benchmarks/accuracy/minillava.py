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
    control_case,
    prune_case,
    residual_on,
)
from vllm_autoprune.http_client import MAX_IN_FLIGHT
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state

Family = Literal["random", "resized", "policies", "found", "quota"]
FAMILIES: tuple[Family, ...] = get_args(Family)
"""Families of cases that can be measured beside the full model; by default all of them."""

BUDGETS = (64, 32, 16, 8, 4)

_SCENES = 15
"""Half an hour of requests on two cores, where all cases are measured."""

_FLAGS = (
    "--enforce-eager", "--max-model-len", "512", "--block-size", "32",
    "--autoprune-state", "cdpruner", "--autoprune-requests", "states",
)  # fmt: skip

_START_TIMEOUT = 1200.0
"""Seconds; a start takes ten on an idle machine, but many minutes on a busy one."""


def build_cases(tokens: int, budgets: Sequence[int], families: Sequence[Family]) -> list[Case]:
    """All cases in the order of the tables, the full model first.

    Raises :class:`ConfigError` for budgets outside 1..N-1.
    """
    if wrong := [budget for budget in budgets if not 0 < budget < tokens]:
        what, fix = f"are not within 1..{tokens - 1}", f"an image has N = {tokens} tokens"
        values = " ".join(map(str, wrong))
        raise ConfigError("eval", [Problem(f"--budgets {values}", what, fix)])
    # Of policies that are not measured themselves, the base of the others is compared with.
    policies = [load_state(SOURCE).base_policy.name] if {"found", "quota"} & set(families) else []
    if "policies" in families:
        policies = [policy for policy in BASE_POLICIES if policy not in MiniLlava.equal_policies]
    cases = [FULL]
    for budget in budgets:
        for keep in ("random", "resized"):
            if keep in families:
                cases.append(control_case(keep, budget))
        for policy in policies:
            base = f"{policy}@{budget}"
            cases.append(prune_case(base, "base", policy, load_state(policy), budget))
            name, label = f"{policy}+{SOURCE}@{budget}", f"{policy} + AutoPrune"
            state = residual_on(policy)
            cases.append(prune_case(name, "autoprune", label, state, budget, base))
        for name, searched_on in SEARCH_RESULTS.items():
            if "found" in families and searched_on == "mini-LLaVA":
                state = load_state(name)
                policy = state.base_policy.name
                label = f"{policy} + what a search found{', with a core' if state.core else ''}"
                base, name = f"{policy}@{budget}", f"{name}@{budget}"
                cases.append(prune_case(name, "found", label, state, budget, base))
        for quota in QUOTAS:
            if "quota" in families and quota <= budget:
                state = load_state(f"ablation-quota-{quota}")
                base, name = f"{state.base_policy.name}@{budget}", f"quota-{quota}@{budget}"
                cases.append(prune_case(name, "quota", f"q_e = {quota}", state, budget, base))
    return cases


class MiniLlavaSuite(QuestionSuite):
    """The questions about the first scenes of the test split, answered in every case."""

    def __init__(
        self,
        folder: Path,
        cases: Sequence[Case],
        scenes: int,
        url: str,
        served_name: str | None,
        max_in_flight: int,
        log: Path,
    ) -> None:
        """Without the address of a server, one is started; ``log`` is its log."""
        questions, urls = [], dict[int, str]()
        for number, example in enumerate(draw_examples("test", scenes)):
            urls.setdefault(example.image_id, png_url(example.image))
            paired = example.pair is not None
            record = Question(
                id=str(number),
                benchmark=MME if paired else example.kind,
                image=str(example.image_id),
                category=example.kind if paired else "",
                pair=str(example.pair) if paired else "",
            )
            image = urls[example.image_id]
            questions.append(PreparedQuestion(record, example.question, example.answer, image))
        name = "embedded" if folder == CHECKPOINTS["minillava"] else folder.name
        super().__init__(
            questions,
            cases,
            url=url,
            served_name=served_name,
            max_in_flight=max_in_flight,
            suite="minillava",
            model=f"mini-LLaVA {name}, weights {weights_digest(folder)}",
            data=f"test split, {scenes} scenes",
        )
        self._model, self._log = folder / "llava", log
        self._flags = (*_FLAGS, "--autoprune-text-tower", str(folder / "clip"))

    def plan(self) -> Sequence[str]:
        """The address of the server, or the command line that starts one; then what is asked."""
        server, requests = super().plan()
        return [server if self.url else " ".join(command(self._model, 8000, self._flags)), requests]

    @contextlib.contextmanager
    def open_server(self, progress: Progress) -> Iterator[str]:
        """The server of the settings, or one that runs while the context is open."""
        if self.url:
            yield self.url
            return
        progress.write("starting vllm serve with mini-LLaVA ...")
        try:
            with serve(self._model, *self._flags, log=self._log, patience=_START_TIMEOUT) as server:
                yield server.url
        except ServerDied as error:
            what = str(error).split("\n")[0].rstrip(":")
            fix = "fix that and add --resume"
            raise EvaluationError(f"{what} (log: {self._log}) -> {fix}") from None

    def objections(self, contents: Contents) -> Iterator[str]:
        """Prompt lengths that do not match K, which shows that a case was not served as asked."""
        tokens = count_tokens(self._model)
        for case in self.cases:
            removed = tokens - case.budget
            for pruned, unpruned in contents.prompt_lengths(case):
                if pruned != unpruned - removed:
                    yield (
                        f"{case.name}: a prompt has {pruned} tokens instead of {unpruned} - "
                        f"{removed}: the case was not served as asked"
                    )
                    break


def count_tokens(llava: Path) -> int:
    """N, the number of visual tokens of an image."""
    return int(json.loads((llava / "config.json").read_text())["image_seq_length"])


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
    text = "folder with llava/ and clip/; default: the embedded model"
    add("--model", type=Path, default=CHECKPOINTS["minillava"], metavar="FOLDER", help=text)
    add("--scenes", type=int, default=_SCENES, help="scenes of the test split")
    add("--budgets", type=int, nargs="+", default=list(BUDGETS), metavar="K", help="each K")
    text = "groups of cases"
    add("--cases", nargs="+", default=list(FAMILIES), choices=FAMILIES, help=text)
    text = "a running server with --autoprune-requests states; default: one is started"
    add("--server-url", default="", metavar="URL", help=text)
    options = parser.parse_args(arguments)
    try:
        for part in ("llava/config.json", "clip/config.json"):
            if not (options.model / part).is_file():
                problem = Problem(f"--model {options.model}", f"has no {part}", "name another")
                raise ConfigError("eval", [problem])
        at_once = options.concurrency or MAX_IN_FLIGHT
        cases = build_cases(count_tokens(options.model / "llava"), options.budgets, options.cases)
        log = options.out / "server.log"
        suite = MiniLlavaSuite(
            options.model, cases, options.scenes, options.server_url, options.served_name, at_once,
            log,
        )  # fmt: skip
        return run_suite(suite, options.out, options)
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
