"""The client of a server: address, keys, trust, proxies, retries, and what each failure says."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import time
from base64 import b64decode
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from benchmarks.common.client import Client
from benchmarks.common.report import command_line
from benchmarks.common.requests import build_body, build_content
from benchmarks.server import serve
from benchmarks.yardsticks.examples import CLIP, LLAVA, draw_examples
from tests.fake_server import Answer, Body, FakeServer, fake_server
from tests.json_values import json_values
from tests.modules import SOURCES, imported_modules
from tests.offline_search.synthetic import (
    MODELS,
    completion,
    endpoint,
    error,
    model_list,
)
from tests.tables import parametrize_from_file
from vllm_autoprune.cli.main import main
from vllm_autoprune.connection import (
    Connection,
    _trust,
    api_address,
    make_client,
    server_address,
)
from vllm_autoprune.errors import ConfigError, EvaluationFailed
from vllm_autoprune.http_client import (
    FAILURES,
    AsyncServerClient,
    Failures,
    Metrics,
    RequestRefused,
    ServerClient,
    ServerLost,
    _read_answer,
    chat_with_retries,
    describe_error,
    read_models,
)

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither keys nor proxies."""
    for name in (*PROXIES, *map(str.upper, PROXIES), "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def refuse(url: str, connection: Connection | None = None) -> str:
    """The line that says why the models of a server cannot be listed."""
    with (
        pytest.raises(ConfigError) as caught,
        ServerClient(url, connection) as client,
        client.reporting_failures(),
    ):
        client.list_models()
    (problem,) = caught.value.problems
    assert "\n" not in str(problem)
    return str(problem)


# ---- addresses ----


@parametrize_from_file("typed", "root", "api")
def test_an_address_is_read_as_people_write_it(typed: str, root: str, api: str) -> None:
    assert (server_address(typed), api_address(typed)) == (root, api)


@pytest.mark.parametrize(
    "typed",
    ["", "http:///v1", "ftp://h", "http://h:port", "http://h:99999", "http://h:0", "http://a b",
     "http://$HOST:1", "http://h\n:1", "/v1", "file:///etc/passwd", "::1:8000",
     "http://foo..bar", "localhost..:8000", f"http://{'a' * 64}:8000", "http://.h"],
)  # fmt: skip
def test_what_is_no_address_says_how_to_write_one(typed: str) -> None:
    with pytest.raises(
        ConfigError, match="is not the address of a server -> give it as"
    ) as caught:
        server_address(typed)
    assert ("IPv6 in brackets" in str(caught.value)) == ("::" in typed)


@given(st.text(max_size=40) | st.from_regex(r"(https?://)?[\w.]{1,9}(:\d+)?(/[\w/]*)?"))
def test_no_text_ends_in_a_traceback_or_in_v1_twice(text: str) -> None:
    try:
        root = server_address(text)
    except ConfigError:
        return
    assert root == server_address(root) == server_address(f"{root}/v1")
    assert not root.endswith(("/v1", "/"))


# ---- keys and headers ----


@pytest.mark.parametrize(
    ("path", "served", "answer"),
    [
        ("/a/b", MODELS, model_list("m")), ("/v2", MODELS, model_list("m")),
        ("/ui/chat", "/ui/v1/models", model_list("m")), ("/a", MODELS, error(401)),
    ],
)  # fmt: skip
def test_the_advice_names_the_address_that_would_have_worked(
    path: str, served: str, answer: Answer
) -> None:
    with fake_server(pages={MODELS: None, served: answer}) as server:
        line = refuse(server.url + path, Connection(api_key=SecretStr("secret")))
    assert line.endswith(
        f"-> give {server.url}{served.removesuffix('/models')}, which answers"
    )
    # The key is only for the address that was given.
    assert "Authorization" not in server.headers[-1]


@parametrize_from_file("variables", "url", "fields", "sent")
def test_a_key_is_sent(
    variables: dict[str, str],
    url: str,
    fields: dict[str, object],
    sent: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, key in variables.items():
        monkeypatch.setenv(name, key)
    connection = Connection.model_validate(fields)
    with make_client(httpx.Client, url, connection) as client:
        assert client.headers.get("authorization") == sent
    assert "key" not in str(connection.model_dump()) and "'k'" not in repr(connection)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        *(
            ({"header": [value]}, "give NAME=VALUE")
            for value in ("x", "=v", "x=\n", "x=é")
        ),
        (
            {"ca_file": "/nowhere.pem"},
            r"cannot be read \(No such file or directory\): name a file",
        ),
        ({"ca_file": __file__}, r"\(it holds no certificate\): name a file"),
    ],
)
def test_flags_that_say_nothing_are_refused(
    fields: dict[str, object], text: str
) -> None:
    with pytest.raises(ValidationError, match=text):
        Connection.model_validate(fields)


def test_headers_and_key_reach_the_server_and_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Connection(
        api_key=SecretStr("secret"), header=["X-Team=blue", "X-Empty= "]
    )
    with (
        fake_server() as server,
        ServerClient(f"{server.url}/v1/", connection) as client,
    ):
        client.list_models()
        Client(server.url, connection=connection).send(b'{"model": "mock"}')
    for headers in server.headers:
        assert (
            headers["Authorization"] == "Bearer secret" and headers["X-Team"] == "blue"
        )
    typed = [
        "load",
        "paired",
        "--api-key",
        "secret",
        "--header=X=secret",
        "--users",
        "1",
    ]
    monkeypatch.setattr("sys.argv", typed)
    assert "secret" not in " ".join(command_line()) and command_line()[-1] == "1"
    monkeypatch.setenv("VLLM_API_KEY", "kéy")
    with pytest.raises(
        ConfigError, match="VLLM_API_KEY: has a character that no key has"
    ):
        ServerClient("http://h")


# ---- certificates and proxies ----


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a private authority, and a server's certificate that it has signed."""
    folder = tmp_path_factory.mktemp("certificates")
    for name, more in (
        ("authority", ()),
        (
            "server",
            (
                "-CA",
                "authority.pem",
                "-CAkey",
                "authority.key",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
            ),
        ),
    ):
        curve = (
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
        )
        files = (
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-subj",
            f"/CN={name}",
        )
        command = ["openssl", "req", "-x509", *curve, *files, *more]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def test_a_private_authority_is_trusted_where_it_is_named(
    certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def encrypt(server: FakeServer, certificates: Path) -> str:
        """Serve by TLS from now on; the address."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            certificates / "server.pem", certificates / "server.key"
        )
        server.socket = context.wrap_socket(server.socket, server_side=True)
        return server.url.replace("http", "https")

    trusting = Connection(ca_file=certificates / "authority.pem")
    _trust.cache_clear()  # whatever other tests have said aloud
    with fake_server() as server:
        url = encrypt(server, certificates)
        assert refuse(url).endswith(
            "-> name the certificate of its authority with --ca-file"
        )
        assert "Hostname mismatch" in refuse(
            url.replace("127.0.0.1", "localhost"), trusting
        )
        for connection in (trusting, Connection(insecure=True)):
            with ServerClient(url, connection) as client:
                assert client.list_models()
            record = Client(url, connection=connection).send(
                b'{"model": "mock", "stream": true}'
            )
            assert record.ok, record.error
    assert (
        capsys.readouterr().err.count("--insecure: certificates are not checked") == 1
    )


def test_requests_pass_a_proxy_and_its_refusal_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = "http://gpu.test:8000"
    with fake_server(pages={far + MODELS: model_list("far")}) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        with ServerClient(f"{far}/v1") as client:
            assert client.list_models() == {"far": 0}
        assert Client(far).send(b'{"model": "mock", "stream": true}').ok
        monkeypatch.setenv("NO_PROXY", "gpu.test")
        assert "asked as HTTP_PROXY and NO_PROXY say" in refuse(far)
        monkeypatch.delenv("NO_PROXY")
        proxy.pages[far + MODELS] = error(407, "who are you")
        assert refuse(far).endswith(
            "-> give HTTP_PROXY as http://USER:PASSWORD@HOST:PORT"
        )
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        assert "cannot be reached by the proxy of" in refuse("https://gpu.test")


@parametrize_from_file("proxy", "fix")
def test_a_proxy_that_cannot_be_used_says_what_to_do(
    proxy: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigError, match="ALL_PROXY: is no proxy") as caught:
        ServerClient("http://h:1")
    assert str(caught.value).endswith(fix) and "pw" not in str(caught.value)


def test_a_connection_that_the_server_may_be_closing_is_not_used() -> None:
    pages = {"/": (200, b"", {"Connection": "keep-alive"})}
    with (
        fake_server(pages=pages) as server,
        make_client(httpx.Client, server.url, Connection()) as client,
    ):

        def port() -> object:
            stream = client.get(server.url).extensions["network_stream"]
            return stream.get_extra_info("client_addr")

        used = port()
        assert port() == used
        time.sleep(2.5)  # vLLM closes it after 5 s
        assert port() != used


def test_every_http_client_is_made_in_one_place() -> None:
    calls = r"\bhttpx\.(?:(?:Async)?Client|get|post|stream|request)\("
    sources = {name: path.read_text() for name, path in SOURCES.items()}
    assert {name for name, text in sources.items() if re.search(calls, text)} == {
        "vllm_autoprune.connection"
    }
    others = {
        "http.client",
        "openai",
        "urllib.request",
        "requests",
        "aiohttp",
        "urllib3",
        "httpx2",
    }
    users = {name for name, path in SOURCES.items() if imported_modules(path) & others}
    assert users == {"vllm_autoprune.evaluation.lmms_plugin.autoprune_lmms.model"}, (
        "lmms-eval's"
    )


# ---- answers and failures ----

PAGE = """\
images_total{stage="before",engine="0"} 10.0
images_total{stage="before",engine="1"} 5.0
images_total{stage="after",engine="0"} 3.0
# TYPE seconds histogram
seconds_bucket{le="+Inf"} 4.0
seconds_count 4.0
seconds_sum 6.0
info{block_size="16"} 1.0
"""


def test_metrics_are_summed_over_the_samples_with_a_label() -> None:
    metrics = Metrics(PAGE)
    earlier = Metrics('images_total{engine="0",stage="after"} 1.0\nseconds_count 1.0\n')
    gained = metrics.since(earlier)
    assert (gained.total("images_total"), gained.total("seconds_count")) == (17.0, 3.0)
    assert metrics.total("images_total", stage="before") == 15.0
    assert metrics.total("images_total", stage="between") is None
    assert (
        metrics.label("info", "block_size") == "16"
        and metrics.label("info", "other") is None
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "does not answer (ConnectError: [Errno 111] Connection refused) -> start the"),
        (error(401, "who are\nyou"), "status 401: who are you -> give the key"),
        (error(404), "status 404: no -> give the address of a vllm serve"),
        ((404, b'{"detail": "Not Found"}', {}), "status 404: Not Found -> "),
        ((502, b"<html><style>b {}</style><h1>Bad\ngateway</h1>", {}),
         "status 502: Bad gateway -> look into the server's log"),
        ((403, b"", {}), "status 403: no text -> give the key"),
        ((418, b'{"error": "\\u001b[31m\\ud83d"}', {}), "status 418: [31m -> look into"),
        ((307, b"", {"Location": "/openai/v1/models"}), "/openai -> give that address"),
        ((200, b"<html>log in</html>", {"Content-Type": "text/html"}),
         "in an unknown format (no JSON object but text/html: <html>log in</html>)"),
        ((200, b"[" * 100_000, {}), "no JSON object but application/json: [[["),
        ((200, b'{"data": [{"name": "m"}]}', {}), "no list of models: {"),
        ((200, b'{"error": {"message": "no credit"}}', {}), "status 200 with an error: no credit"),
        ((200, b"{}", {"Content-Encoding": "gzip"}), "in an unknown format (Error -3"),
        (model_list(), "lists no model"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_used_says_why(
    answer: Answer | None, text: str
) -> None:
    with endpoint(lambda body, number: error(500)) as server:
        server.pages[MODELS] = answer
        assert text in refuse("http://127.0.0.1:9" if answer is None else server.url)


@parametrize_from_file("header", "wait")
def test_a_server_says_how_long_to_wait(
    header: str, wait: float, capsys: pytest.CaptureFixture[str]
) -> None:
    if header.startswith("+"):
        header = formatdate(time.time() + float(header), usegmt=True)
    response = httpx.Response(429, headers={"Retry-After": header})
    request = httpx.Request("POST", "http://h")
    failures = Failures("http://h")
    refused = httpx.HTTPStatusError("", request=request, response=response)
    assert [failures.wait(refused, 7.0) for _ in range(2)] == pytest.approx(
        [wait] * 2, abs=2
    )
    failures.report()
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "http://h limited this run: 2 x status 429: no text, asked again"
    assert len(said) == 1 + (wait >= 30.0), "a long wait is said once"


@given(
    st.sampled_from([200, 201, 204, 302, 400, 404, 429, 500, 599]),
    st.binary(max_size=40)
    | json_values("data id max_model_len error message detail choices").map(str.encode),
    st.sampled_from(
        ["application/json", "text/html; charset=utf-16", "text/event-stream", ";"]
    ),
)
def test_any_answer_is_read_or_said_in_one_line(
    status: int, content: bytes, kind: str
) -> None:
    response = httpx.Response(
        status,
        content=content,
        headers={"Content-Type": kind},
        request=httpx.Request("GET", "h:"),
    )
    for read in (read_models, _read_answer):
        line = "read"
        try:
            read(response)
        except RequestRefused as refusal:
            line = str(refusal)
        except FAILURES as failure:
            line = describe_error(failure)
        assert line.isprintable() and len(line) < 500


# ---- further attempts ----


@pytest.mark.parametrize("status", [408, 425, 429, 503])
def test_the_list_of_models_is_asked_for_again(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([error(status, **{"Retry-After": "0.01"}), model_list("m")])
    pages = {MODELS: lambda: next(answers)}
    with fake_server(pages=pages) as server, ServerClient(server.url) as client:
        assert client.list_models() == {"m": 0}
    assert f"limited this run: 1 x status {status}" in capsys.readouterr().err


def test_a_bug_of_ours_is_neither_asked_again_nor_a_servers_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(response: httpx.Response) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("vllm_autoprune.http_client.read_models", fail)
    with fake_server(pages={MODELS: model_list("m")}) as server:
        with (
            pytest.raises(KeyError, match="ours"),
            ServerClient(server.url) as client,
            client.reporting_failures(),
        ):
            client.list_models()
        assert len(server.headers) == 1
    assert capsys.readouterr().err == ""


@parametrize_from_file("param", "kind", "fix")
async def test_a_refusal_carries_the_kind_that_the_server_says(
    param: str | None, kind: str, fix: str
) -> None:
    refusal = error(400, "wrong -> mend it", param)
    with endpoint(lambda body, number: refusal) as server:
        with pytest.raises(RequestRefused) as caught:
            await ask(server.url)
        (problem,) = caught.value.problems
        assert (problem.where, problem.kind, problem.fix) == (server.url, kind, fix)
    assert caught.value.reason == "status 400: wrong -> mend it"


async def test_the_last_attempt_is_not_said_to_be_asked_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (
        endpoint(lambda body, number: error(503)) as server,
        pytest.raises(EvaluationFailed, match="status 503: no, after 3 attempts"),
    ):
        await ask(server.url)
    assert len(server.requests) == 3
    printed = capsys.readouterr().err
    assert (
        printed == f"{server.url} limited this run: 2 x status 503: no, asked again\n"
    )


async def ask(*urls: str) -> str:
    servers = [AsyncServerClient(url, max_in_flight=1) for url in urls]
    try:
        answer = await chat_with_retries(servers, {}, attempts=3, first_wait=0.001)
    finally:
        for server in servers:
            await server.close()
    return str(answer["choices"][0]["message"]["content"])


async def test_failures_that_may_pass_are_retried_and_refusals_are_not() -> None:
    replies = [
        error(503),
        error(429),
        completion("yes"),
        completion("yes"),
        error(422, "never"),
    ]
    with endpoint(lambda body, number: replies[number]) as server:
        assert await ask(server.url) == "yes"
        assert await ask("http://127.0.0.1:9", server.url) == "yes"
        with pytest.raises(RequestRefused, match="422: never"):
            await ask(server.url)
        assert len(server.requests) == len(replies)


async def test_servers_that_stopped_are_told_from_a_failed_request() -> None:
    failed = pytest.raises(
        EvaluationFailed,
        match="an unknown format: no JSON object but application/json: no JSON, after 3",
    )
    with endpoint(lambda body, number: (200, b"no JSON", {})) as server, failed:
        await ask(server.url)

    def dying(body: Body, number: int) -> Answer:
        server.pages[MODELS] = error(503, "down")
        return error(500)

    with (
        endpoint(dying) as server,
        pytest.raises(ServerLost, match="stopped answering"),
    ):
        await ask(server.url)


# ---- a real server ----


@pytest.mark.engine
def test_a_real_server_is_asked_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = draw_examples("test", 1)[0]
    picture = tmp_path / "scene.png"
    picture.write_bytes(b64decode(question.png_url.partition(",")[2]))
    data = tmp_path / "questions.jsonl"
    line = {
        "image": picture.name,
        "question": question.question,
        "answer": question.answer,
    }
    data.write_text(json.dumps(line))
    flags = ("--autoprune-state", "minillava", "--autoprune-text-tower", str(CLIP))
    limits = (
        "--enforce-eager",
        "--max-model-len",
        "1024",
        "--autoprune-requests",
        "states",
    )
    with serve(LLAVA, *flags, *limits, "--api-key", "k1") as server:
        assert "status 401: Unauthorized -> give the key that the server" in refuse(
            server.url
        )
        content = build_content(question.question, [question.png_url])
        body = build_body(str(LLAVA), content, tokens=4)
        assert "status 401" in str(Client(server.url).send(body).error)
        evaluation = ["eval", "--data", str(data), "--server-url", f"{server.url}/v1"]
        evaluation += [
            "--state",
            "minillava",
            "--budgets",
            "16",
            "--out",
            str(tmp_path / "out"),
        ]
        assert main(evaluation) == 1, "refused for the key"
        assert main([*evaluation, "--api-key", "k1"]) == 0
        monkeypatch.setenv("OPENAI_API_KEY", "k1")
        assert Client(server.url).send(body).ok
        probe = [
            "advise",
            "--questions",
            "4",
            "--server",
            server.url,
            "--probe",
            "336x336",
        ]
        assert main(probe) == 0
