"""A canary says which checkpoint answered, and never that a wrong answer is right."""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.errors import GoldenUnusable, HarnessError
from harness.guards.canary import (
    Answer,
    Golden,
    GoldenPair,
    complete,
    largest_difference,
    prompt_logprobs_of,
    request_body,
)

PROMPTS = ((1, 5, 6), (1, 7))
OLD = ((-1.0, -2.0), (-3.0,))
NEW = ((-1.5, -2.0), (-3.0,))


def golden(logprobs: tuple[tuple[float, ...], ...], **changes: Any) -> Golden:
    made = Golden(
        weights_id="w-0",
        engine="reference",
        build="0",
        hardware="cpu",
        flags=("auto", "256"),
        prompts=PROMPTS,
        prompt_logprobs=logprobs,
        noise_max=0.0,
        noise_checks=20,
        tolerance=0.01,
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def pair() -> GoldenPair:
    return GoldenPair(golden(OLD), golden(NEW))


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        (OLD, Answer.OLD),
        (NEW, Answer.NEW),
        (((-1.005, -2.0), (-3.009,)), Answer.OLD),
        (((-1.25, -2.0), (-3.0,)), Answer.NEITHER),
        (((-1.0, -2.0), (-3.02,)), Answer.NEITHER),
        (((-1.0, math.nan), (-3.0,)), Answer.NEITHER),
        (((-1.0, -math.inf), (-3.0,)), Answer.NEITHER),
        (((-1.0,), (-3.0,)), Answer.NEITHER),
        (((-1.0, -2.0),), Answer.NEITHER),
        ((), Answer.NEITHER),
        (((), ()), Answer.NEITHER),
    ],
)
def test_which_checkpoint_answered(pair: GoldenPair, rows: tuple[tuple[float, ...], ...], answer: Answer) -> None:
    assert pair.compare(rows).answer is answer


def test_checkpoints_that_are_too_alike_are_ambiguous_and_said_to_be() -> None:
    alike = GoldenPair(golden(OLD), golden(((-1.001, -2.0), (-3.0,))))
    assert alike.compare(OLD).answer is Answer.AMBIGUOUS
    assert alike.are_alike
    apart = GoldenPair(golden(OLD), golden(NEW))
    assert not apart.are_alike
    assert apart.separation == pytest.approx(0.5)
    assert GoldenPair(golden(OLD, tolerance=0.2), golden(NEW)).are_alike  # the larger tolerance counts


def test_goldens_of_other_prompts_cannot_be_compared() -> None:
    with pytest.raises(GoldenUnusable, match="different prompts"):
        GoldenPair(golden(OLD), golden(NEW, prompts=((1, 5, 6), (1, 8))))


def test_golden_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    golden(OLD).save(path)
    assert Golden.load(path) == golden(OLD)
    assert [file.name for file in tmp_path.iterdir()] == ["golden.json"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"flags": 1}', '{"weights_id": "w-0"}'])
def test_a_file_that_is_no_golden_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "golden.json"
    path.write_text(content)
    with pytest.raises(HarnessError, match="is not a golden file"):
        Golden.load(path)
    with pytest.raises(HarnessError, match="is not a golden file"):
        Golden.load(tmp_path / "none")


def test_difference_of_other_layouts_is_infinite() -> None:
    assert largest_difference(OLD, OLD) == 0
    assert largest_difference(OLD, NEW) == 0.5
    assert largest_difference(OLD, OLD[:1]) == math.inf
    assert largest_difference((), ()) == math.inf


def answer_to(prompts: tuple[tuple[int, ...], ...], rows: tuple[tuple[float, ...], ...]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "prompt_logprobs": [None, *({str(t): {"logprob": value}} for t, value in zip(p[1:], row, strict=True))],
        }
        for index, (p, row) in enumerate(zip(prompts, rows, strict=True))
    ]
    return {"choices": choices[::-1]}  # servers may answer out of order


def test_prompt_logprobs_are_read_in_the_order_of_the_prompts() -> None:
    assert prompt_logprobs_of(answer_to(PROMPTS, OLD), PROMPTS) == OLD


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"choices": []},
        {"choices": [{"index": 0, "prompt_logprobs": None}, {"index": 1, "prompt_logprobs": None}]},
        answer_to(((1, 5, 6), (1, 8)), OLD),
        answer_to(((1, 5), (1, 7)), ((-1.0,), (-3.0,))),
    ],
)
def test_an_answer_without_these_prompts_logprobs_is_an_error(response: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no prompt logprobs for these prompts"):
        prompt_logprobs_of(response, PROMPTS)


@contextmanager
def server(status: int, body: bytes, seen: list[tuple[str, str, Any]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers.get("Authorization", ""), asked))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join(timeout=10)
        listening.server_close()


def test_asks_once_with_the_key_and_returns_the_answer() -> None:
    seen: list[tuple[str, str, Any]] = []
    body = request_body("rollout", PROMPTS)
    with server(200, b'{"choices": []}', seen) as endpoint:
        assert complete(endpoint, body, api_key="secret", limit_s=10) == {"choices": []}
    assert seen == [("/v1/completions", "Bearer secret", body)]
    assert body["prompt"] == [[1, 5, 6], [1, 7]]
    assert (body["temperature"], body["prompt_logprobs"], body["max_tokens"]) == (0, 0, 1)


def test_an_answer_whose_socket_is_closed_with_its_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 does so where the server ends the connection; here every Python does."""
    reading = http.client.HTTPResponse.read1

    def closing(response: http.client.HTTPResponse, size: int = -1) -> bytes:
        piece = reading(response, size)
        if response.length == 0 and response.fp is not None:
            response.fp.close()
            response.fp = None  # type: ignore[assignment]
        return piece

    monkeypatch.setattr(http.client.HTTPResponse, "read1", closing)
    with server(200, b'{"choices": []}', []) as endpoint:
        assert complete(endpoint, {}, api_key=None, limit_s=10) == {"choices": []}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (500, b"out of memory", "HTTP 500: out of memory"),
        (200, b"[]", "not a JSON object"),
        (200, b"<html>", "Expecting"),
    ],
)
def test_anything_but_a_json_answer_is_an_error(status: int, body: bytes, expected: str) -> None:
    with server(status, body, []) as endpoint, pytest.raises(ValueError, match=expected):
        complete(endpoint, {}, api_key=None, limit_s=10)


def test_a_closed_port_is_a_transport_error() -> None:
    with server(200, b"{}", []) as endpoint:
        pass
    with pytest.raises(OSError, match="refused"):
        complete(endpoint, {}, api_key=None, limit_s=10)
