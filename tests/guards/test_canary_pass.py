"""Canary passes on servers of many kinds: in turn, over TLS, with older words, streamed, and past a stale cache."""

from __future__ import annotations

import json
import math
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from harness.cli import main
from harness.guards.canary import Golden, GoldenPair, LogprobRows, TokenRows, of_pass, pass_count
from harness.guards.canary_pass import How, ask, check_deep, check_stream
from harness.guards.decoded import Decoded, Steps, stream
from harness.guards.engine_api import EngineApi, tls_context

PROMPTS: TokenRows = tuple(tuple(range(first, first + 4)) for first in (3, 10, 20, 30, 40, 50, 60, 70))
DEEP = tuple(range(3, 43))
TOKENS = (7, 8, 9)


def logprob(token: int) -> float:
    """Return what the stub answers for a token of a prompt."""
    return -token / 8


def rows_of(prompts: TokenRows) -> LogprobRows:
    return tuple(tuple(logprob(token) for token in prompt[1:]) for prompt in prompts)


def decoded(prompt: tuple[int, ...], *, margin: float = 1.0) -> Decoded:
    return Decoded(
        prompt=prompt,
        tokens=TOKENS,
        logprobs=tuple(logprob(token) for token in TOKENS),
        margins=(margin,) * len(TOKENS),
        noise_max=0.0,
        noise_checks=10,
        tolerance=0.02,
    )


GOLDEN = Golden(
    weights_id="w-0",
    engine="stub",
    build="0",
    hardware="cpu",
    flags=(),
    prompts=PROMPTS,
    prompt_logprobs=rows_of(PROMPTS),
    noise_max=0.0,
    noise_checks=40,
    tolerance=0.01,
    vocabulary_size=100,
    streamed=decoded(PROMPTS[0]),
    deep=decoded(DEEP),
)


class Stub:
    """An OpenAI-compatible server whose answers a test may change."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.knows_prompt_logprobs = True
        self.knows_echo = False
        self.refuses: tuple[int, str] | None = None
        self.damaged: set[int] = set()  # first tokens of prompts that are answered wrongly
        self.stale = False  # long prompts are answered from an old cache, unless asked with a salt
        self.shift = 0.0  # of decoded logprobs
        self.tokens = TOKENS
        self.gives_ids = True
        self.broken = ""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send(200, {"data": [{"id": "served", "max_model_len": 64}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.asked.append({**body, "key": self.headers.get("Authorization"), "path": self.path})
                if stub.refuses is not None:
                    self.send(stub.refuses[0], {"error": stub.refuses[1]})
                elif body.get("stream"):
                    self.stream(body)
                else:
                    self.send(200, stub.answer(body))

            def send(self, status: int, content: Any) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                kind = "application/json" if stub.broken == "type" else "text/event-stream; charset=utf-8"
                self.send_header("Content-Type", kind)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for chunk in stub.chunks(body):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                if stub.broken != "framing":
                    self.wfile.write(b"0\r\n\r\n")
                self.close_connection = True

            def log_message(self, *arguments: object) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None: ...

        self.server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join(10)
        self.server.server_close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if "prompt_logprobs" in body or body.get("echo"):
            return {"choices": [self.scored(body, index, row) for index, row in enumerate(body["prompt"])]}
        shift = 1.0 if self.stale and len(body["prompt"]) > 16 and "cache_salt" not in body else self.shift
        details = {"prompt_tokens_details": {"cached_tokens": 32}} if len(body["prompt"]) > 16 else {}
        usage = {"completion_tokens": len(self.tokens), **details}
        return {"choices": [self.continued(self.tokens, shift, "length")], "usage": usage}

    def scored(self, body: dict[str, Any], index: int, row: list[int]) -> dict[str, Any]:
        values = [logprob(token) + 0.5 * (row[0] in self.damaged) for token in row[1:]]
        choice: dict[str, Any] = {"index": index, "text": "x"}
        if self.knows_prompt_logprobs and "prompt_logprobs" in body:
            pairs = zip(row[1:], values, strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in pairs)]
        if self.knows_echo and body.get("echo"):
            choice["logprobs"] = {"token_logprobs": [None, *values, -0.1]}
        return choice

    def continued(self, tokens: tuple[int, ...], shift: float, reason: str | None) -> dict[str, Any]:
        names = [f"token_id:{token}" for token in tokens]
        values = [logprob(token) + shift for token in tokens]
        shown = {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": [{name: value, "token_id:0": value - 1} for name, value in zip(names, values, strict=True)],
        }
        return {
            "index": 0,
            "text": "x" * len(tokens),
            "logprobs": shown if self.gives_ids else None,
            "token_ids": list(tokens) if self.gives_ids else None,
            "finish_reason": reason,
        }

    def chunks(self, body: dict[str, Any]) -> list[bytes]:
        events: list[Any] = []
        for place, token in enumerate(self.tokens):
            is_last = place == len(self.tokens) - 1 and self.broken != "reason"
            events.append({"choices": [self.continued((token,), self.shift, "length" if is_last else None)]})
        events.append({"choices": [], "usage": {"completion_tokens": len(self.tokens) + (self.broken == "count")}})
        if self.broken == "error":
            events.insert(1, {"error": {"message": "EngineCore encountered an issue."}})
        texts = [json.dumps(event) for event in events]
        if self.broken == "json":
            texts[1] = texts[1][:-2]
        texts += [] if self.broken == "mark" else ["[DONE]"]
        return [f"data: {text}\n\n".encode() for text in texts]


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    yield made
    made.close()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    GOLDEN.save(tmp_path / "golden.json")
    return tmp_path / "golden.json"


def api(stub: Stub, **more: Any) -> EngineApi:
    return EngineApi(url=stub.url, limit_s=10.0, **more)


# --- in turn ---


def test_passes_take_turns_through_all_prompts() -> None:
    assert pass_count(PROMPTS) == 4
    assert [of_pass(PROMPTS, turn) for turn in range(4)] == [PROMPTS[first : first + 2] for first in (0, 2, 4, 6)]
    assert of_pass(PROMPTS, 5) == of_pass(PROMPTS, 1)
    assert of_pass(PROMPTS, None) == PROMPTS
    assert of_pass(PROMPTS[:3], 1) == PROMPTS[2:3]


def test_an_answer_is_compared_with_the_pass_that_was_asked() -> None:
    other = replace(GOLDEN, prompt_logprobs=tuple(tuple(v + 0.5 for v in row) for row in GOLDEN.prompt_logprobs))
    pair = GoldenPair(GOLDEN, other)
    assert pair.compare(rows_of(PROMPTS[2:4]), 1).answer == "old"
    assert pair.compare(rows_of(PROMPTS[2:4]), 2).answer == "neither"
    assert pair.compare(rows_of(PROMPTS[2:4])).answer == "neither"
    assert pair.separation == 0.5
    half = replace(other, prompt_logprobs=(*GOLDEN.prompt_logprobs[:2], *other.prompt_logprobs[2:]))
    assert GoldenPair(GOLDEN, half).are_alike  # one pass cannot tell them apart


def test_one_pass_costs_two_prompts_and_sees_only_its_own(stub: Stub, golden: Path) -> None:
    stub.damaged = {40}  # the fifth prompt: pass 3 of 4
    codes = [main(["canary", stub.url, "--golden", str(golden), "--rotation", str(turn)]) for turn in range(4)]
    assert codes == [0, 0, 1, 0]
    assert [len(asked["prompt"]) for asked in stub.asked] == [2] * 4
    assert all(asked["max_tokens"] == 1 for asked in stub.asked)


def test_a_probe_without_memory_comes_to_every_pass(stub: Stub, golden: Path) -> None:
    for _ in range(60):
        assert main(["canary", stub.url, "--golden", str(golden), "--model", "m"]) == 0
    assert {asked["prompt"][0][0] for asked in stub.asked} == {3, 20, 40, 60}  # missed once in 10**7 tries


def test_everything_is_asked_before_traffic(stub: Stub, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["canary", stub.url, "--golden", str(golden), "--all", "--json"]) == 0
    assert [asked["prompt"][0] for asked in stub.asked[:4]] == [list(PROMPTS[turn]) for turn in (0, 2, 4, 6)]
    assert stub.asked[4]["stream"] is True
    said = json.loads(capsys.readouterr().out)
    assert said["stream"]["right"] is True
    assert (said["asked"]["pass"], said["asked"]["passes"]) == (None, 4)
    stub.damaged = {70}
    assert main(["canary", stub.url, "--golden", str(golden), "--all"]) == 1


def test_the_price_is_said(stub: Stub, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["canary", stub.url, "--golden", str(golden), "--period-s", "20", "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["asked"]
    assert (asked["prompt_tokens"], asked["output_tokens"], asked["period_s"]) == (8, 2, 20.0)
    assert asked["share_of_engine_time"] == pytest.approx(asked["took_s"] / 20, abs=1e-4)
    assert main(["canary", stub.url, "--golden", str(golden)]) == 0
    assert "every 10 s that is at most 0." in capsys.readouterr().out


# --- servers of other kinds ---


def test_older_words_are_used_where_the_new_ones_are_not_known(
    stub: Stub, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.knows_prompt_logprobs, stub.knows_echo = False, True
    asked = ask(api(stub), "m", PROMPTS, rotation=None)
    assert (asked.how, asked.rows) == (How.ECHO, rows_of(PROMPTS))
    assert ["echo" in body for body in stub.asked] == [False, True, True, True, True]
    stub.damaged = {3, 20, 40, 60}
    assert main(["canary", stub.url, "--golden", str(golden)]) == 1
    assert "by echo with logprobs" in capsys.readouterr().out


def test_a_server_that_refuses_unknown_words_is_asked_in_older_ones() -> None:
    class Strict(Stub):
        def answer(self, body: dict[str, Any]) -> dict[str, Any]:
            self.refuses = (400, "unknown parameter")
            return {}

    strict = Strict()
    try:
        with pytest.raises(ValueError, match=r"cannot be checked: asked for `prompt_logprobs`: .*; asked for `echo`"):
            ask(api(strict), "m", PROMPTS, rotation=0)
        assert ["echo" in body for body in strict.asked] == [False, True]
    finally:
        strict.close()


def test_no_logprobs_are_said_to_be_missing(stub: Stub, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub.knows_prompt_logprobs = False
    assert main(["canary", stub.url, "--golden", str(golden)]) == 2
    assert "the server gives no logprobs of prompts, so it cannot be checked" in capsys.readouterr().err


def test_values_that_are_not_finite_are_a_wrong_answer(
    stub: Stub, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.refuses = (400, "Out of range float values are not JSON compliant: nan")
    assert main(["canary", stub.url, "--golden", str(golden)]) == 1
    assert "logprobs are not finite" in capsys.readouterr().out


def test_an_overloaded_server_is_not_asked_in_other_words(stub: Stub, golden: Path) -> None:
    stub.refuses = (503, "busy")
    assert main(["canary", stub.url, "--golden", str(golden), "--model", "m"]) == 2
    assert len(stub.asked) == 1


def test_the_key_is_sent_and_never_shown(
    stub: Stub, golden: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "geheim")
    stub.refuses = (401, "no such key: geheim")
    assert main(["canary", f"{stub.url}/v1", "--golden", str(golden), "--model", "m"]) == 2
    assert (stub.asked[0]["key"], stub.asked[0]["path"]) == ("Bearer geheim", "/v1/completions")
    said = capsys.readouterr().err
    assert "no such key: ***" in said
    assert "the API key comes from the variable VLLM_API_KEY" in said
    assert "geheim" not in said + repr(api(stub, api_key="geheim"))


# --- TLS ---


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def encrypted(authority: trustme.CA) -> Iterator[Stub]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    made = Stub(context)
    yield made
    made.close()


def test_a_certificate_is_checked_against_the_authority_given(
    encrypted: Stub, authority: trustme.CA, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    call = ["canary", encrypted.url, "--golden", str(golden)]
    assert main([*call, "--ca-file", str(tmp_path / "ca.pem"), "--all"]) == 0
    assert main([*call, "--ca-file", str(tmp_path / "other.pem")]) == 2
    assert main(call) == 2
    assert "--ca-file names the authority to trust" in capsys.readouterr().err
    assert main([*call, "--insecure", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"]["authenticated"] is False
    assert main([*call, "--ca-file", str(tmp_path / "absent.pem")]) == 3
    assert main(["canary", encrypted.url.replace("https", "http"), "--golden", str(golden), "--insecure"]) == 3


def test_a_name_that_is_not_in_the_certificate_is_refused(
    encrypted: Stub, authority: trustme.CA, tmp_path: Path
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    url = encrypted.url.replace("127.0.0.1", "localhost")
    with pytest.raises(ssl.SSLCertVerificationError, match="localhost"):
        EngineApi(url=url, limit_s=5.0, tls=tls_context(tmp_path / "ca.pem", insecure=False)).served()


# --- streams ---


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("mark", r'ended without "\[DONE\]"'),
        ("framing", "broke off|IncompleteRead"),
        ("json", "not JSON"),
        ("error", "an error inside the stream"),
        ("count", "holds 3 tokens, the server counts 4"),
        ("reason", "no finish_reason"),
        ("type", 'not a stream but "application/json"'),
    ],
)
def test_a_broken_stream_is_found_and_named(
    stub: Stub, golden: Path, broken: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.broken = broken
    with pytest.raises((ValueError, OSError), match=said):
        stream(api(stub), "m", PROMPTS[0], max_tokens=3)
    assert check_stream(api(stub), "m", GOLDEN).because
    assert main(["canary", stub.url, "--golden", str(golden)]) == 0  # a pass asks whole answers only
    assert main(["canary", stub.url, "--golden", str(golden), "--all"]) == 1
    assert "stream: " in capsys.readouterr().out


def test_a_stream_of_other_tokens_is_found(stub: Stub) -> None:
    assert check_stream(api(stub), "m", GOLDEN).because == ""
    stub.tokens = (7, 8)
    assert check_stream(api(stub), "m", GOLDEN).because == "2 tokens came, 3 were expected"
    stub.tokens = (7, 9, 9)
    assert "another token came where the golden's was certain" in check_stream(api(stub), "m", GOLDEN).because
    stub.tokens, stub.shift = TOKENS, 0.1
    assert "logprobs differ by 0.1 from the golden's" in check_stream(api(stub), "m", GOLDEN).because


def test_a_server_that_gives_no_ids_is_checked_as_far_as_can_be(stub: Stub) -> None:
    stub.gives_ids = False
    seen = check_stream(api(stub), "m", GOLDEN)
    assert (seen.because, seen.saw) == ("", "framing, number of tokens")
    stub.tokens = (7, 8)
    assert check_stream(api(stub), "m", GOLDEN).because == "2 tokens came, 3 were expected"
    assert check_stream(api(stub), "m", replace(GOLDEN, streamed=None)).because == "2 tokens came, 4 were expected"


def steps(tokens: tuple[int, ...], *logprobs: float) -> Steps:
    return Steps(tokens=tokens, logprobs=logprobs, margins=(0.0,) * len(tokens), count=len(tokens))


def test_tokens_count_only_where_they_are_certain() -> None:
    known = tuple(logprob(token) for token in TOKENS)
    certain, unsure = decoded(DEEP, margin=0.041), decoded(DEEP, margin=0.04)
    other = steps((7, 5, 6), known[0], known[1] - 0.01, -9.0)
    assert certain.difference(other) == math.inf
    assert unsure.difference(other) == pytest.approx(0.01)  # what follows another token says nothing
    assert unsure.difference(steps((7, 5, 6), known[0] - 1, known[1], -9.0)) == 1.0
    assert certain.difference(steps(TOKENS, *known[:2], math.nan)) == math.inf
    assert certain.difference(steps(TOKENS[:2], *known[:2])) == math.inf
    assert certain.difference(steps(TOKENS, *known)) == 0.0


# --- long prompts ---


def test_a_stale_cache_is_told_from_wrong_weights(stub: Stub, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert GOLDEN.deep is not None
    right = check_deep(api(stub), "m", GOLDEN.deep)
    assert (right.because, right.prompt_tokens) == ("", 2 * len(DEEP))
    assert "32 of its tokens cached" in right.saw
    stub.stale = True
    assert "the KV cache is stale" in check_deep(api(stub), "m", GOLDEN.deep).because
    assert main(["canary", stub.url, "--golden", str(golden), "--all"]) == 0  # short prompts cannot see it
    assert main(["canary", stub.url, "--golden", str(golden), "--deep"]) == 1
    assert "long prompt: a prompt of 40 tokens: logprobs differ by 1" in capsys.readouterr().out
    stub.stale, stub.shift = False, 1.0
    assert "it is not the KV cache" in check_deep(api(stub), "m", GOLDEN.deep).because


def test_a_golden_without_a_long_prompt_cannot_be_asked_for_it(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(GOLDEN, deep=None).save(tmp_path / "short.json")
    assert main(["canary", stub.url, "--golden", str(tmp_path / "short.json"), "--deep"]) == 3
    assert "harness golden --deep" in capsys.readouterr().err
    assert stub.asked == []


# --- files ---


def test_metrics_are_written_whole(stub: Stub, golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "canary.prom"
    stub.damaged = {3, 20, 40, 60}
    for code, success in ((1, "0.0"), (0, "1.0")):
        assert main(["canary", stub.url, "--golden", str(golden), "--textfile", str(path)]) == code
        lines = path.read_text().splitlines()
        assert f"rollout_canary_success {success}" in lines
        assert f"rollout_canary_exit_code {code}.0" in lines
        assert any(line.startswith("rollout_canary_took_seconds 0.") for line in lines)
        stub.damaged = set()
    assert main(["canary", "http://127.0.0.1:1", "--golden", str(golden), "--textfile", str(path)]) == 2
    assert "rollout_canary_exit_code 2.0" in path.read_text()
    assert "took" not in path.read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["canary.prom", "golden.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tolerance": 0.0}, "its tolerance is 0"),
        ({"tolerance": math.inf}, "its tolerance is inf"),
        ({"prompt_logprobs": GOLDEN.prompt_logprobs[:7]}, "is not a golden file"),
        ({"prompt_logprobs": ((math.nan,) * 3, *GOLDEN.prompt_logprobs[1:])}, "not finite"),
        ({"prompts": (), "prompt_logprobs": ()}, "do not fit together"),
        ({"streamed": replace(decoded(DEEP), tolerance=math.inf)}, "the tolerance of a continuation is inf"),
        ({"deep": replace(decoded(DEEP), margins=())}, "another number of margins"),
    ],
)
def test_a_golden_that_would_let_everything_pass_is_refused(
    stub: Stub, change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(GOLDEN, **change).save(tmp_path / "bad.json")
    assert main(["canary", stub.url, "--golden", str(tmp_path / "bad.json")]) == 3
    assert said in capsys.readouterr().err


def test_a_golden_of_an_older_release_is_named(stub: Stub, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden.write_text(json.dumps({**json.loads(golden.read_text()), "greedy_tokens": []}))
    assert main(["canary", stub.url, "--golden", str(golden)]) == 3
    assert "make it anew with `harness golden`" in capsys.readouterr().err


def test_an_answer_that_never_ends_ends_at_the_limit() -> None:
    class Endless(Stub):
        def chunks(self, body: dict[str, Any]) -> Any:
            gone = threading.Event()
            for _ in range(200):
                yield b": ping\n\n"
                gone.wait(0.05)

    endless = Endless()
    try:
        with pytest.raises(TimeoutError, match=r"no whole answer within 0\.4 s|timed out"):
            stream(EngineApi(url=endless.url, limit_s=0.4), "m", PROMPTS[0], max_tokens=3)
    finally:
        endless.close()
