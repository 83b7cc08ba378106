"""Pages and site: what they name exists, what they list is complete, figures are the code's."""

from __future__ import annotations

import argparse
import csv
import json
import re
import shlex
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.config import ObservabilityConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from benchmarks.policies import FOUND_ON_TWO, FREE, OURS, READING, SOURCE
from benchmarks.search.results import _format_mean, read_confirmed, read_results
from scripts.models_table import count_square, format_models, read_table
from scripts.site_hooks import _adapt_page, _generate_files
from scripts.wrapped_table import format_wrapped, read_wrapped
from tests.docs.commands import read_commands
from vllm_autoprune import __version__
from vllm_autoprune.advise import WAYS
from vllm_autoprune.base_policies import importance
from vllm_autoprune.cli.commands import SUMMARIES
from vllm_autoprune.cli.main import main
from vllm_autoprune.serving import startup
from vllm_autoprune.serving.api import engine_requests, planner
from vllm_autoprune.serving.api.endpoint import NAME, PATH
from vllm_autoprune.serving.api.headers import HEADERS
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.compat import BELOW, LOWEST
from vllm_autoprune.serving.flags import add_flags
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.request_rules import LEVELS
from vllm_autoprune.serving.worker.features import ImageFeatures, TensorCache
from vllm_autoprune.serving.worker.metrics import Stopwatch, WorkerMetrics
from vllm_autoprune.serving.worker.selection import FallbackReporter
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.cost import state_cost
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE, load_state, shipped_states
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "benchmarks/yardsticks/README.md",
)
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in OUTSIDE)])
    if path.parent.name != "changes"  # fragments: tests/test_release.py
}


def read_data(name: str) -> list[dict[str, str]]:
    """Rows of a file in docs/data."""
    return list(csv.DictReader((DOCS / f"data/{name}.csv").read_text().splitlines()))


ARCHITECTURE, SERVING, DEPLOY, CHOOSING, SUPPORT, STUDY = (
    PAGES[f"docs/{name}.md"]
    for name in (
        "architecture",
        "serving",
        "deploy",
        "choosing",
        "support",
        "studies/search",
    )
)


@pytest.mark.parametrize("page", PAGES)
def test_modules_commands_and_links_of_a_page_exist(page: str) -> None:
    text = re.sub(r"\s+", " ", PAGES[page])  # commands are broken across lines
    packages = "benchmarks|tests|offline_search|vllm_autoprune"
    names = re.findall(rf"python -m ((?:{packages})(?:\.\w+)*)", text)
    for path in (ROOT / name.replace(".", "/") for name in names):
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), (
            path
        )
    if not page.endswith("faq.md"):
        assert set(re.findall(r"`vllm-autoprune ([a-z]+)", text)) <= SUMMARIES.keys()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert {
        link for link in links if not ((ROOT / page).parent / link).exists()
    } == set()


def test_the_architecture_describes_every_package() -> None:
    packages = {
        str(path.parent.relative_to(ROOT))
        for top in ("vllm_autoprune", "offline_search", "benchmarks")
        for path in (ROOT / top).rglob("*.py")
    }
    pattern = r"^\| `((?:vllm_autoprune/|offline_search|benchmarks)[\w/]*)` \|"
    listed = re.findall(pattern, ARCHITECTURE, re.MULTILINE)
    assert sorted(listed) == sorted(packages - {"vllm_autoprune"})


def test_the_table_of_what_is_wrapped_is_that_of_the_code() -> None:
    assert read_wrapped() == format_wrapped()


# ---- Serving and deployment ----


def test_serving_lists_every_flag_level_and_field() -> None:
    actions = add_flags(argparse.ArgumentParser())._actions
    options = [option for action in actions for option in action.option_strings]
    flags = [option for option in options if option.startswith("--autoprune")]
    assert (
        len(flags) >= 6
        and [flag for flag in flags if f"| `{flag} " not in SERVING] == []
    )
    levels = re.findall(
        r"^\| `([\w-]+)` \| (?:nothing|a budget|also)", SERVING, re.MULTILINE
    )
    assert tuple(levels) == LEVELS
    fields = set(re.findall(r'^\| `"(\w+)":', SERVING, re.MULTILINE))
    of_messages = {
        "instructions",
        "details",
        "turns",
        "recall_turns",
        "video_instructions",
    }
    assert fields == set(PruningRequest.model_fields) - of_messages
    assert {*re.findall(r"`(x-autoprune[\w-]+): ", SERVING)} == {*HEADERS}
    assert PATH in SERVING and NAME in SERVING


def test_pages_dashboard_and_alerts_name_the_metrics_that_exist(tmp_path: Path) -> None:
    series = re.compile(r"\b(?:(?:autoprune_(?!endpoint)|vllm:)\w+|up(?={))")

    def list_vllm_samples() -> set[str]:
        """Names of the series that the installed vLLM exports from the start."""
        model = SimpleNamespace(
            served_model_name="m", max_model_len=1024, is_diffusion=False
        )
        unused = ("speculative", "kv_transfer", "ec_transfer", "lora", "watermark")
        configs = dict.fromkeys((f"{name}_config" for name in unused), None)
        observed = ObservabilityConfig()
        PrometheusStatLogger(
            SimpleNamespace(
                model_config=model, observability_config=observed, **configs
            )
        )
        names = {
            sample.name for family in REGISTRY.collect() for sample in family.samples
        }
        unregister_vllm_metrics()
        return {name for name in names if name.startswith("vllm:")}

    reporter = FallbackReporter()
    reporter.errors["ValueError"] = 1
    reporter.report(torch.zeros(1, dtype=torch.uint8))
    with closing(WorkerMetrics(str(tmp_path))) as worker:
        worker.publish(
            Stopwatch(torch.device("cpu")), reporter, TensorCache[ImageFeatures](1)
        )
    workers = CollectorRegistry()
    MultiProcessCollector(workers, path=str(tmp_path))  # type: ignore[no-untyped-call]
    assert planner.__doc__ and startup.__doc__  # their metrics are registered by now
    engine_requests.make_kv_bytes_counter()
    kinds = {
        family.name + "_total" * (family.type == "counter"): family.type
        for registry in (REGISTRY, workers)
        for family in registry.collect()
        if family.name.startswith("autoprune_")
    }
    listed = re.findall(r"^\| `(autoprune_\w+)` \|", SERVING, re.MULTILINE)
    assert sorted(listed) == sorted(kinds)
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    samples = {n + part for n, kind in kinds.items() for part in parts.get(kind, ("",))}
    text = (DOCS / "grafana.json").read_text(encoding="utf-8")
    shown = set(series.findall(" ".join(re.findall(r'"(?:expr|query)": "(.*)"', text))))
    assert {name for name in shown if name.startswith("autoprune_")} == samples
    monitoring = (ROOT / "examples/kubernetes/monitoring.yaml").read_text(
        encoding="utf-8"
    )
    _, rules = yaml.safe_load_all(monitoring)
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    asked = [set(series.findall(alert["expr"])) for alert in alerts]
    assert len(asked) >= 6 and all(asked)
    known = samples | list_vllm_samples() | {"up"}  # Prometheus's own
    assert (
        shown.union(*asked) <= known
        and "vllm:time_to_first_token_seconds_bucket" in shown
    )
    for alert in alerts:  # each says what to do
        assert " -> " in alert["annotations"]["summary"], alert["alert"]
    assert set(series.findall(SERVING + DEPLOY)) <= known | kinds.keys()
    panels = [panel["id"] for panel in json.loads(text)["panels"]]
    assert len(set(panels)) == len(panels)


@pytest.mark.compat
@pytest.mark.slow
def test_every_flag_on_the_pages_is_one_of_vllm_serve() -> None:
    vllm = Path(sys.executable).with_name("vllm")
    shown = subprocess.check_output([vllm, "serve", "--help=all"], text=True)
    known = set(re.findall(r"--[a-z][a-z-]+", shown))
    calls = [c.text for c in read_commands() if "vllm serve " in c.text]
    others = {"--gpus", "--ipc", "--system", "--no-deps"}  # of docker and pip
    others |= {"--count", "--minutes"}  # of our own commands
    texts = " ".join([SERVING, DEPLOY, *calls])
    assert set(re.findall(r"--[a-z][a-z-]+", texts)) - others <= known


# ---- Figures ----


def test_the_default_state_is_ahead_of_the_best_published_one_on_models_unseen() -> (
    None
):
    rows = [
        row
        for row in read_data("accuracy")
        if not row["category"] and row["budget"] in ("all", "K = 18", "K = N/8")
    ]
    right = {(row["yardstick"], row["name"]): float(row["accuracy"]) for row in rows}
    reads = {row["name"] for row in rows if row["reads_question"] == "True"}
    published = {*BASE_POLICIES, SOURCE} - {*OURS}
    totals = dict.fromkeys(published - reads, 0.0)
    columns = list(
        zip(
            *re.findall(
                r"^\| (.+) \| (\d.+) \| (\d.+) \| (\d.+|-) \| (\d.+|-) \|$",
                CHOOSING,
                re.M,
            ),
            strict=True,
        )
    )
    for model, cells, found in zip(
        ("mini-LLaVA", "mini-Qwen3-VL", "mini-InternVL", "mini-Gemma"),
        columns[1:],
        ("minillava", "miniqwen", "", ""),
        strict=True,
    ):
        of_model = {name: right.get((model, name), 0.0) for name in published}
        totals = {name: total + of_model[name] for name, total in totals.items()}
        controls = [
            f"{right[model, name]:.1f}"
            for name in (
                "full",
                "resized",
                "random",
                "norm",
                "pivoted_qr",
                READING,
                FREE,
                FOUND_ON_TWO,
            )
        ]
        states = [
            max(totals, key=of_model.__getitem__),
            max(published & reads, key=of_model.__getitem__),
            found,
        ]
        assert [*cells] == controls + [
            f"{right[model, name]:.1f}, `{name}`" if name else "-" for name in states
        ]
    best = max(totals, key=totals.__getitem__)
    assert f"**`{DEFAULT_STATE}` is the default**" in CHOOSING
    assert DEFAULT_STATE not in reads
    assert f"ahead of `{best}`, the best published state" in " ".join(CHOOSING.split())
    ahead = {
        duel["yardstick"]: float(duel["less_base_low"])
        for duel in read_data("duels")
        if not duel["category"]
        and duel["budget"] == "K = N/8"
        and duel["name"] == f"{DEFAULT_STATE} less {best}"
    }
    assert min(ahead["mini-InternVL"], ahead["mini-Gemma"]) > 0
    names = ("serve_llava.sh", "serve_qwen.sh", "compose/compose.yaml")
    texts = "".join((ROOT / "examples" / name).read_text() for name in names)
    texts += PAGES["README.md"] + PAGES["docs/index.md"]
    served = re.findall(
        r"(llava-hf|Qwen)/\S+[\s\\-]+autoprune-state[ =]([a-z]\S+)", texts
    )
    assert {*served} == {("llava-hf", DEFAULT_STATE), ("Qwen", DEFAULT_STATE)} and len(
        served
    ) == 7
    budgets = re.findall(
        r"(llava-hf|Qwen)/\S+[\s\\-]+autoprune-state[ =]\S+[\s\\-]+autoprune-budget[ =](\S+)",
        texts,
    )
    llava = BACKBONES["LlavaForConditionalGeneration"].budget
    qwen = BACKBONES["Qwen2_5_VLForConditionalGeneration"].budget
    assert {*budgets} == {("llava-hf", llava), ("Qwen", qwen)} and len(budgets) == 7
    assert f"at N/{llava[2:]}: `" in CHOOSING and f"at N/{qwen[2:]} (right" in CHOOSING


def test_every_row_of_the_data_has_its_command_and_commit() -> None:
    names = {path.stem for path in (DOCS / "data").glob("*.csv")}
    without = {
        name
        for name in names
        if not all(row.get("command") and row.get("commit") for row in read_data(name))
    }
    assert without == {"released-candidates"}, "which the authors' files have"


NAMES = ("accuracy", "choosing", "claims", "evaluation", "figures", "states")
PAGES_OF_FIGURES = ["README", *(f"docs/{name}" for name in NAMES)]


@pytest.mark.parametrize("page", PAGES_OF_FIGURES)
def test_every_decimal_of_a_page_is_in_the_data_that_it_links(page: str) -> None:
    code = r"```.*?```|`[^`]*`|\]\([^)]*\)|<!-- demo.*/demo -->|## As published.*"
    if page == "docs/claims":  # what the paper says is in italics
        code += r"|(?<!\*)\*[^*\n]+\*(?!\*)"
    # Numbers of versions and papers, and what is predicted, which the next test computes.
    no_figures = r"(vLLM|Python|arXiv|or)\s[\d.]+|\| (another|break-even)[^|]*\| [\d.]+"
    text = PAGES[f"{page}.md"]
    rows = [
        row
        for name in re.findall(r"data/([\w-]+)\.csv", text)
        for row in read_data(name)
    ]
    about = {"setting", "model", "command", "commit"}
    cells = [
        cell for row in rows for column, cell in row.items() if column not in about
    ]
    values = {float(number) for number in re.findall(r"\d+\.?\d*", " ".join(cells))}
    prose = re.sub(f"{code}|{no_figures}", "", text, flags=re.DOTALL)
    figures = re.findall(r"(?<![\w.-])\d+\.\d{1,3}(?![\w.]*\d)", prose)
    close = {figure: 0.501 * 10 ** -len(figure.partition(".")[2]) for figure in figures}
    assert len(figures) >= 5
    assert [
        f for f in figures if not any(abs(float(f) - x) <= close[f] for x in values)
    ] == []


def test_serving_has_the_predicted_costs_of_shipped_states() -> None:
    costs = sorted((state_cost(load_state(name)), name) for name in shipped_states())
    rows = {
        row["setting"].rpartition("; ")[2]: row["value"]
        for row in read_data("state-cost")
    }
    for cost, name in (costs[0], costs[-1]):
        assert float(rows[name]) == pytest.approx(cost, abs=0.05)
    assert f"Shipped states cost {costs[0][0]:.0f} to {costs[-1][0]:.0f} ms" in SERVING


def test_choosing_has_what_advise_prints_and_its_ways(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (call,) = {
        command.text for command in read_commands() if "--tower-ms" in command.text
    }
    assert main(shlex.split(call)[1:]) == 0
    (block,) = re.findall(r"```text\n(Pruning .*?)```", CHOOSING, re.DOTALL)
    assert block in capsys.readouterr().out
    assert [way for way in WAYS if f"\n| {way} | " not in CHOOSING] == []
    assert main([*shlex.split(call)[1:], "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    for name, way, digits in (
        ("question-reading", "question-reading", 1),
        ("split, K_c = 256", "split", 0),
    ):
        last = ways[way]["cheaper_than_stock"]["to"]
        share = ways[way]["another_of_first"]
        assert f"first, {name} | {share:.2f} |" in CHOOSING
        assert re.search(rf"break-even of {name}.* \| {last:.{digits}f} \|", CHOOSING)


def test_the_page_on_backbones_has_every_one() -> None:
    rows = re.findall(
        r"^\| (\w.+?) \| .+ \| (.+) \|$", PAGES["docs/backbones.md"], re.MULTILINE
    )
    backbones = set(BACKBONES.values())
    named = [name for names, _ in rows for name in names.split(", ")]
    assert len(named) == len(set(named)) == len(backbones)
    ((names, _),) = [row for row in rows if "M-RoPE" in row[1]]
    assert len(names.split(", ")) == sum(backbone.mrope for backbone in backbones)


def read_counts() -> dict[str, int]:
    """N of each backbone in the table of models."""
    rows = re.findall(
        r"^\| .+ \| `(\w+)` \| (\d+) \| \d+ \| \S+ \|$",
        read_table(),
        re.MULTILINE,
    )
    return {BACKBONES[architecture].name: int(count) for architecture, count in rows}


def test_the_table_of_models_is_the_registry_s() -> None:
    assert read_table() == format_models(read_counts())
    states = {backbone.state for backbone in BACKBONES.values()}
    assert states == {DEFAULT_STATE}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", {backbone.name: None for backbone in BACKBONES.values()}
)
def test_the_table_of_models_has_what_vllm_s_processor_counts(name: str) -> None:
    assert read_counts()[name] == count_square(name)


def test_every_feature_of_support_names_tests_that_exist() -> None:
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    rows = re.findall(
        r"^\| (.+) \| (yes|refused|no|untested) \| .* \| ?(.*) \|$", SUPPORT, re.M
    )
    assert len(rows) > 30 and len({feature for feature, _, _ in rows}) == len(rows)
    for feature, status, named in rows:
        assert named or status == "untested", feature
        assert set(re.findall(r"`(.+?)`", named)) <= files, feature


def test_support_names_every_vllm_that_is_accepted_and_what_it_was_tested_with() -> (
    None
):
    rows = re.findall(r"^\| ([\d.]+) \| (0\.\d+) \| (.*?) \|", SUPPORT, re.MULTILINE)
    minors = [f"{LOWEST.major}.{minor}" for minor in range(LOWEST.minor, BELOW.minor)]
    assert [row[:2] for row in rows] == [(__version__, minor) for minor in minors]
    names = ("torch", "transformers")
    installed = [f"{name} {'.'.join(version(name).split('.')[:2])}" for name in names]
    assert rows[0][2] == ", ".join(installed)
    assert f"VLLM_VERSION=v{minors[0]}." in (ROOT / "Dockerfile").read_text(
        encoding="utf-8"
    )


def test_the_study_has_a_row_for_every_recorded_search_and_no_other() -> None:
    studies = ROOT / "benchmarks/search/recorded/study"
    rows = []
    for folder in sorted(studies.iterdir()):
        results = read_results(folder)
        confirmed = read_confirmed(folder)
        winners = {
            name: result.winner for name, result in results.items() if result.winner
        }
        assert set(winners) == set(confirmed)
        for name, winner in winners.items():
            assert (
                load_state(winner.state).digest
                == winner.digest
                == confirmed[name].digest
            )
            assert confirmed[name].questions == 600
        for arm in ("autoprune+@none", "tpe", "random"):
            if f"{arm}-0" not in confirmed:
                continue
            scores, others = (
                [confirmed[f"{name}-{seed}"] for seed in range(8)]
                for name in (arm, "tpe")
            )
            gaps = [
                a.objective - b.objective for a, b in zip(scores, others, strict=True)
            ]
            gap = (
                "-"
                if arm == "tpe"
                else f"{'+' if sum(gaps) > 0 else ''}{_format_mean(gaps, 2)}"
            )
            objective = _format_mean([score.objective for score in scores], 2)
            accuracy = _format_mean([100 * score.accuracy for score in scores], 1)
            rows.append(
                f"| `{arm.removesuffix('@none')}` | {objective} | {accuracy} | {gap} |"
            )
    printed = re.findall(r"\| `[a-z+]+` \| -[\d.]+ ± [\d.]+ \| .*", STUDY)
    assert sorted(printed) == sorted(rows)


def test_the_method_on_the_page_becomes_a_policy() -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", PAGES["docs/development.md"], re.DOTALL
    )
    exec(code, dict(vars(importance)))
    policy = BASE_POLICIES.pop("loudest")
    features = torch.tensor([3.0, 1.0, 2.0, 9.0, 8.0, 7.0])[None, :, None].expand(
        2, 6, 4
    )
    tokens = VisualTokens(features, Grid(1, 3, tiles=2))
    assert (
        policy.select(policy.default_params, tokens, 3).picks.tolist()
        == [[0, 3, 2]] * 2
    )


# ---- The site ----


def test_links_to_files_outside_docs_become_paths() -> None:
    within = "[states](states.md), [search](../search.md#strategies), "
    text = _adapt_page(
        f"{within}[the policy](../../SECURITY.md#scope)", "studies/search.md"
    )
    assert text == f"{within}the policy (`SECURITY.md` in the repository)"
    with pytest.raises(
        FileNotFoundError, match=r"studies/search\.md links to nosuch\.md"
    ):
        _adapt_page("[x](../../nosuch.md)", "studies/search.md")


def test_the_front_page_has_the_demo_and_links_lead_to_the_repository() -> None:
    front = _adapt_page((DOCS / "index.md").read_text(encoding="utf-8"), "index.md")
    assert "](images/" in front and "| all tokens |" in front
    assert "](data/demo.csv)" in front
    link = "[how](../CONTRIBUTING.md#x)"
    assert _adapt_page(link, "faq.md") == "how (`CONTRIBUTING.md` in the repository)"
    address = "https://example.org/project"
    there = f"[how]({address}/blob/main/CONTRIBUTING.md#x)"
    assert _adapt_page(link, "faq.md", address) == there


def test_the_site_has_every_page_once_and_what_the_commands_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = _generate_files()
    for name, call in (
        ("atoms.md", ["atoms", "--prompt"]),
        ("autoprune-state-1.schema.json", ["atoms", "--schema"]),
    ):
        assert main(call) == 0
        assert files[name].endswith(capsys.readouterr().out)
    placed = re.findall(
        r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    written = (*DOCS.glob("*.md"), *DOCS.glob("studies/*.md"))
    pages = {"atoms.md", *(path.relative_to(DOCS).as_posix() for path in written)}
    assert sorted(placed) == sorted(pages) and placed[0] == "index.md"
    row = _adapt_page(r"| `--state PATH\|NAME` | a \| b |", "index.md")
    assert row == r"| `--state PATH|NAME` | a \| b |"
