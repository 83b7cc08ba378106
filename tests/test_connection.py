"""Addresses, keys, headers, certificates and proxies of every request, and who makes clients."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
from base64 import b64decode
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from benchmarks.common.client import Client
from benchmarks.common.fake_server import FakeServer, fake_server
from benchmarks.common.report import command_line
from benchmarks.common.requests import build_body, build_content
from benchmarks.server import serve
from benchmarks.yardsticks.examples import CLIP, LLAVA, draw_examples, png_url
from tests.offline_search.synthetic import error, model_list
from tests.test_import_boundaries import SOURCES, imported_modules
from vllm_autoprune.cli.main import main
from vllm_autoprune.connection import Connection, api_address, make_client, server_address
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.http_client import ServerClient, reporting_failures

MODELS = "/v1/models"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither keys nor proxies."""
    for name in (*PROXIES, *map(str.upper, PROXIES), "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


# ---- addresses ----


@pytest.mark.parametrize(
    ("typed", "root"),
    [
        *((f"http://h:1{end}", "http://h:1") for end in ("", "/", "//", "/v1", "/v1/", "/v1//",
          "//v1", "/v1/v1", "/v1/models", "/v1/chat/completions", "/v1?a=b", "/#top")),
        *((f"https://gw/openai{end}", "https://gw/openai") for end in ("", "/", "/v1", "/v1/")),
        ("h:1", "http://h:1"), ("localhost", "http://localhost"), ("10.0.0.1:8000/v1/",
         "http://10.0.0.1:8000"), ("h.example/a/v1", "http://h.example/a"),
        ("HTTP://H:1/", "http://h:1"), (" http://h:1 \n", "http://h:1"), ("<http://h:1>",
         "http://h:1"), ('"http://h:1"', "http://h:1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"), ("[::1]:8000", "http://[::1]:8000"),
        ("http://user:pw@h:1/v1", "http://h:1"), ("user:pw@h:1", "http://h:1"),
        ("http://h:80", "http://h"), ("https://h:443/v1", "https://h"),
        ("http://h/v1beta/openai", "http://h/v1beta/openai"), ("http://h/v10", "http://h/v10"),
        ("http://my_host:1", "http://my_host:1"),
    ],
)  # fmt: skip
def test_an_address_is_read_as_people_write_it(typed: str, root: str) -> None:
    assert server_address(typed) == server_address(root) == root


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        *((typed, "give it as http://HOST:PORT") for typed in (
            "", "http://", "http:///v1", "ftp://h", "http://h:port", "http://h:99999", "http://h:0",
            "http://a b", "http://{host}:8000", "http://$HOST:1", "http://h\\x", "http://h\n:1",
            "/v1", "file:///etc/passwd", "unix:///run/s", "http://h;x")),
        ("::1:8000", "IPv6 in brackets"), ("http://fe80::1/v1", "IPv6 in brackets"),
    ],
)  # fmt: skip
def test_what_is_no_address_says_how_to_write_one(typed: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server_address(typed)
    (problem,) = caught.value.problems
    assert problem.what == "is not the address of a server" and fix in problem.fix


@given(st.text(max_size=40) | st.from_regex(r"(https?://)?[\w.]{1,9}(:\d+)?(/[\w/]*)?"))
def test_no_text_ends_in_a_traceback_or_in_v1_twice(text: str) -> None:
    try:
        root = server_address(text)
    except ConfigError:
        return
    assert root == server_address(root) == server_address(f"{root}/v1")
    assert not root.endswith(("/v1", "/"))


@pytest.mark.parametrize(
    ("typed", "base"),
    [
        ("https://api.example.com", "https://api.example.com/v1"), ("h:1/v1/", "http://h:1/v1"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai"),
        ("https://h/api/paas/v4", "https://h/api/paas/v4"),
        ("https://gw/openai/v1/chat/completions", "https://gw/openai/v1"),
        ("https://h/v4/chat/completions", "https://h/v4"),
    ],
)  # fmt: skip
def test_the_address_of_an_endpoint_may_have_another_version(typed: str, base: str) -> None:
    assert api_address(typed) == base


def refuse(url: str, connection: Connection | None = None) -> str:
    """The line that says why the models of a server cannot be listed."""
    with (
        pytest.raises(ConfigError) as caught,
        reporting_failures(server_address(url)),
        ServerClient(url, connection) as client,
    ):
        client.list_models()
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize(
    ("path", "served", "answer"),
    [
        ("/a/b", MODELS, model_list("m")), ("/v2", MODELS, model_list("m")),
        ("/ui/chat", "/ui/v1/models", model_list("m")), ("/a", MODELS, error(401)),
    ],
)  # fmt: skip
def test_the_advice_names_the_address_that_would_have_worked(
    path: str, served: str, answer: tuple[int, bytes, dict[str, str]]
) -> None:
    with fake_server(pages={MODELS: None, served: answer}) as server:
        line = refuse(server.url + path, Connection(api_key=SecretStr("secret")))
    assert line.endswith(f"-> give {server.url}{served.removesuffix('/models')}, which answers")
    # The key is only for the address that was given.
    assert "Authorization" not in server.headers[-1]


# ---- keys and headers ----


@pytest.mark.parametrize(
    ("variables", "url", "fields", "sent"),
    [
        ({}, "http://h", {}, None),
        ({"OPENAI_API_KEY": "o"}, "http://h", {}, "Bearer o"),
        ({"OPENAI_API_KEY": "o", "VLLM_API_KEY": "v\n"}, "http://h", {}, "Bearer v"),
        ({"OPENAI_API_KEY": "o", "VLLM_API_KEY": ""}, "http://h", {}, "Bearer o"),
        ({"VLLM_API_KEY": "v"}, "http://h", {"api_key": "k"}, "Bearer k"),
        ({"VLLM_API_KEY": "v"}, "http://h", {"api_key": ""}, None),
        ({"VLLM_API_KEY": "v"}, "http://user:p%40w@h", {}, "Basic dXNlcjpwQHc="),
        ({"VLLM_API_KEY": "v"}, "http://h", {"header": ["authorization = Token t"]}, "Token t"),
    ],
)
def test_a_key_is_sent(
    variables: dict[str, str], url: str, fields: dict[str, object], sent: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, key in variables.items():
        monkeypatch.setenv(name, key)
    connection = Connection.model_validate(fields)
    with make_client(httpx.Client, url, connection) as client:
        assert client.headers.get("authorization") == sent
    assert "key" not in str(connection.model_dump()) and "'k'" not in repr(connection)


@pytest.mark.parametrize("key", ["kéy", "a\nb", "“k”"])
def test_a_key_that_no_header_can_hold_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ConfigError, match="VLLM_API_KEY: has a character that no key has"):
        ServerClient("http://h")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        *(
            ({"header": [value]}, "give NAME=VALUE")
            for value in ("x", "=v", "a b=c", "x=\n", "x=é")
        ),
        ({"ca_file": "/nowhere.pem"}, r"cannot be read \(No such file or directory\): name a file"),
        ({"ca_file": __file__}, r"\(it holds no certificate\): name a file"),
        ({"ca_file": "/"}, r"\(Is a directory\): name a file"),
    ],
)
def test_flags_that_say_nothing_are_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        Connection.model_validate(fields)


def test_headers_and_key_reach_the_server_and_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection(api_key=SecretStr("secret"), header=["X-Team=blue", "X-Empty= "])
    with fake_server() as server, ServerClient(f"{server.url}/v1/", connection) as client:
        client.list_models()
        Client(server.url, connection=connection).send(b'{"model": "mock"}')
    for headers in server.headers:
        assert headers["Authorization"] == "Bearer secret" and headers["X-Team"] == "blue"
    typed = ["load", "paired", "--api-key", "secret", "--header=X=secret", "--users", "1"]
    monkeypatch.setattr("sys.argv", typed)
    assert "secret" not in " ".join(command_line()) and command_line()[-1] == "1"


# ---- certificates ----


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a private authority, and a server's certificate that it has signed."""
    folder = tmp_path_factory.mktemp("certificates")

    def make(name: str, *more: str) -> None:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
        command = ["openssl", "req", "-x509", *curve, *files, *more]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    make("authority")
    signed = ("-CA", "authority.pem", "-CAkey", "authority.key")
    make("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    make("other", *signed, "-addext", "subjectAltName=DNS:elsewhere")
    return folder


def encrypt(server: FakeServer, certificates: Path, name: str = "server") -> str:
    """Serve by TLS from now on; the address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server.url.replace("http", "https")


def test_a_private_authority_is_trusted_where_it_is_named(
    certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trusting = Connection(ca_file=certificates / "authority.pem")
    with fake_server() as server:
        url = encrypt(server, certificates)
        assert refuse(url).endswith("-> name the certificate of its authority with --ca-file")
        assert refuse(server.url).endswith(f"-> give {url}/v1, which answers")
        for connection in (trusting, Connection(insecure=True)):
            with ServerClient(url, connection) as client:
                assert client.list_models()
            record = Client(url, connection=connection).send(b'{"model": "mock", "stream": true}')
            assert record.ok, record.error
    assert capsys.readouterr().err.count("--insecure: certificates are not checked") == 1
    with fake_server() as server:
        assert "IP address mismatch" in refuse(encrypt(server, certificates, "other"), trusting)
    with fake_server() as server:
        https = server.url.replace("http", "https")
        assert refuse(https).endswith(f"-> give {server.url}/v1, which answers")


# ---- proxies ----


def test_requests_pass_a_proxy_and_its_refusal_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert refuse(far).endswith("-> give HTTP_PROXY as http://USER:PASSWORD@HOST:PORT")
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        assert "cannot be reached by the proxy of" in refuse("https://gpu.test")


@pytest.mark.parametrize(
    ("proxy", "text"),
    [
        ("socks5://h:1", '-> pip install "httpx[socks]", or unset it'),
        ("socks5h://user:pw@h:1", '-> pip install "httpx[socks]", or unset it'),
        *((proxy, "-> correct or unset it") for proxy in ("socks4://h:1", "ftp://h", "http://h:x")),
    ],
)
def test_a_proxy_that_cannot_be_used_says_what_to_do(
    proxy: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    for make in (ServerClient, Client):
        with pytest.raises(ConfigError) as caught:
            make("http://h:1")
        (problem,) = caught.value.problems
        assert problem.where == "ALL_PROXY" and str(problem).endswith(text)
        assert "pw" not in str(problem)


# ---- one client ----


def test_every_http_client_is_made_in_one_place() -> None:
    calls = r"\bhttpx\.(?:(?:Async)?Client|get|post|stream|request)\("
    sources = {name: path.read_text() for name, path in SOURCES.items()}
    makers = {name for name, text in sources.items() if re.search(calls, text)}
    assert makers == {"vllm_autoprune.connection"}
    assert {name for name, text in sources.items() if "OpenAI(" in text} == {
        "offline_search.proposer"
    }
    others = {"http.client", "urllib.request", "requests", "aiohttp", "urllib3", "httpx2"}
    assert not {name for name, path in SOURCES.items() if imported_modules(path) & others}


# ---- a real server ----


@pytest.mark.engine
@pytest.mark.timeout(500)
def test_a_real_server_is_asked_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, picture = draw_examples("test", 1)[0], tmp_path / "scene.png"
    picture.write_bytes(b64decode(png_url(question.image).partition(",")[2]))
    data = tmp_path / "questions.jsonl"
    line = {"image": picture.name, "question": question.question, "answer": question.answer}
    data.write_text(json.dumps(line))
    flags = ("--autoprune-state", "minillava", "--autoprune-text-tower", str(CLIP))
    limits = ("--enforce-eager", "--max-model-len", "1024", "--autoprune-requests", "states")
    with serve(LLAVA, *flags, *limits, "--api-key", "k1") as server:
        assert "status 401: Unauthorized -> give the key that the server" in refuse(server.url)
        content = build_content(question.question, [png_url(question.image)])
        body = build_body(str(LLAVA), content, tokens=4)
        assert "status 401" in str(Client(server.url).send(body).error)
        evaluation = ["eval", "--data", str(data), "--server-url", f"{server.url}/v1"]
        evaluation += ["--state", "minillava", "--budgets", "16", "--out", str(tmp_path / "out")]
        assert main(evaluation) == 1, "refused for the key"
        assert main([*evaluation, "--api-key", "k1"]) == 0
        monkeypatch.setenv("OPENAI_API_KEY", "k1")
        assert Client(server.url).send(body).ok
        probe = ["advise", "--questions", "4", "--server", server.url, "--probe", "336x336"]
        assert main(probe) == 0
