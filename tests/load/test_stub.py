"""The stub is the truth that the client is measured by: what it sends is looked at without any HTTP library."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns

import pytest
from ends import ENDS
from stub import Stub

from harness.clock import Deadline
from harness.observe.history import RequestResult

TOKENS = 8


def exchange(endpoint: str, *, fault: str, keep_alive: bool = False) -> bytes:
    """Send one request on a plain socket and return every byte of the answer up to its end."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    body = json.dumps({"model": fault, "prompt": [3, 4, 5], "max_tokens": TOKENS}).encode()
    connection = "keep-alive" if keep_alive else "close"
    head = f"POST / HTTP/1.1\r\nConnection: {connection}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5.0) as client:
        client.sendall(head.encode() + body)
        answer = b""
        while data := client.recv(65536):
            answer += data
    return answer


def served_by(fault: str) -> tuple[Stub, bytes]:
    with Stub(lambda served: str(served.body["model"])) as stub:
        return stub, exchange(stub.endpoint, fault=fault)


def test_a_whole_answer_is_what_http_says() -> None:
    stub, answer = served_by("ok")
    head, _, body = answer.partition(b"\r\n\r\n")
    texts = re.findall(rb'"text": "(\d+) "', body)

    assert head.startswith(b"HTTP/1.1 200 OK")
    assert body.endswith(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    assert [int(text) for text in texts] == stub.served[0].sent_ns
    assert len(texts) == TOKENS


def test_stamps_are_in_order_and_paced() -> None:
    before_ns = monotonic_ns()
    with Stub(pace_s=0.02, first_s=0.05) as stub:
        exchange(stub.endpoint, fault="ok")
    served, after_ns = stub.served[0], monotonic_ns()

    assert before_ns < served.read_ns < served.sent_ns[0] < served.sent_ns[-1] < after_ns
    assert served.sent_ns[0] - served.read_ns >= 50_000_000
    assert min(later - earlier for earlier, later in pairwise(served.sent_ns)) >= 20_000_000


def test_a_freeze_holds_back_what_is_due_in_it() -> None:
    with Stub() as stub:
        start_ns = monotonic_ns()
        end_ns = start_ns + 200_000_000
        stub.freeze(start_ns, end_ns)
        exchange(stub.endpoint, fault="ok")

    assert stub.served[0].sent_ns[0] >= end_ns


@pytest.mark.parametrize(
    ("fault", "ending"),
    [
        ("no_done", rb'"completion_tokens": 8}}\n\n\r\n0\r\n\r\n$'),
        ("no_finish", rb"0\r\n\r\n$"),
        ("cut_chunk", rb"40\r\ndata: {$"),
        ("cut_between_chunks", rb"\n\n\r\n$"),
        ("done_cut", rb"data: \[DO\r\n0\r\n\r\n$"),
        ("header_cut", rb"^HTTP/1.1 200 OK\r\nContent-Type:$"),
        ("until_close", rb"^HTTP/1.1 200 OK(?!.*chunked).*data: \[DONE\]\n\n$"),
        ("inband_error", rb'^HTTP/1.1 200 OK.*"error".*\[DONE\]'),
        ("close", rb"^$"),
        ("html", rb"text/html"),
        ("redirect", rb"^HTTP/1.1 307"),
        ("http_503_cut", rb"^HTTP/1.1 503 No"),
        ("mixed_model", rb'"model": "mixed_model".*"model": "another"'),
        ("wrong_model", rb'"model": "another"'),
        ("abort", rb'"finish_reason": "abort"'),
    ],
)
def test_a_fault_is_really_played(fault: str, ending: bytes) -> None:
    _, answer = served_by(fault)

    assert re.search(ending, answer, re.DOTALL), answer


@pytest.mark.parametrize("fault", ["reset", "reset_mid_stream", "header_reset", "header_then_reset"])
def test_a_reset_is_one(fault: str) -> None:
    with pytest.raises(ConnectionResetError):
        served_by(fault)


@pytest.mark.parametrize("fault", [name for name, end in ENDS.items() if end is not RequestResult.OK])
def test_no_fault_looks_like_a_whole_answer(fault: str) -> None:
    with Stub(lambda served: str(served.body["model"])) as stub:
        try:
            answer = exchange_for(stub.endpoint, fault)
        except ConnectionResetError:
            return
        whole = exchange_for(stub.endpoint, "ok")

    assert without_stamps(answer, fault) != without_stamps(whole, "ok")


def exchange_for(endpoint: str, fault: str, *, limit_s: float = 0.15) -> bytes:
    """Return what came within the limit."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    body = json.dumps({"model": fault, "prompt": [3], "max_tokens": TOKENS}).encode()
    deadline = Deadline.after(limit_s)
    with socket.create_connection((host, int(port)), timeout=limit_s) as client:
        client.sendall(f"POST / HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b""
        with suppress(TimeoutError):
            while not deadline.is_expired() and (data := client.recv(65536)):
                answer += data
    return answer


def without_stamps(answer: bytes, fault: str) -> bytes:
    return re.sub(rb"\d{6,}|cmpl-\d+", b"N", answer.replace(f'"{fault}"'.encode(), b'"m"'))


def test_a_connection_is_kept_for_the_next_request() -> None:
    with Stub() as stub:
        host, _, port = stub.endpoint.removeprefix("http://").partition(":")
        body = json.dumps({"model": "m", "prompt": [3], "max_tokens": 2}).encode()
        request = f"POST / HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection((host, int(port)), timeout=5.0) as client:
            client.sendall(request + request)  # the second lies in the same packet
            answers = b""
            while answers.count(b"0\r\n\r\n") < 2:
                answers += client.recv(65536)

    assert [served.connection for served in stub.served] == [0, 0]


def test_what_tools_ask_first_is_answered() -> None:
    with Stub() as stub:
        host, _, port = stub.endpoint.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=5.0) as client:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n")
            answer = b""
            while data := client.recv(65536):
                answer += data

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert stub.served == []


def test_as_a_program_it_reports_what_it_sent() -> None:
    program = [sys.executable, str(Path(__file__).with_name("stub.py")), "--faults", "no_done,ok"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdin is not None
        assert stub.stdout is not None
        endpoint = stub.stdout.readline().strip()
        answers = [exchange(endpoint, fault="m") for _ in range(3)]
        stub.stdin.close()
        lines = [json.loads(line) for line in stub.stdout]

    assert [b"[DONE]" in answer for answer in answers] == [False, True, False]
    assert [line["fault"] for line in lines] == ["no_done", "ok", "no_done"]
    assert [(line["prompt"], len(line["sent_ns"])) for line in lines] == [([3, 4, 5], TOKENS)] * 3


def test_as_a_program_it_freezes_at_the_request_it_was_told() -> None:
    program = [
        sys.executable,
        str(Path(__file__).with_name("stub.py")),
        "--freeze-at-request",
        "1",
        "--freeze-s",
        "0.2",
    ]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdin is not None
        assert stub.stdout is not None
        endpoint = stub.stdout.readline().strip()
        for _ in range(3):
            exchange(endpoint, fault="m")
        stub.stdin.close()
        waited_s = [(line["sent_ns"][0] - line["read_ns"]) / 1e9 for line in map(json.loads, stub.stdout)]

    assert waited_s[1] >= 0.2
    assert max(waited_s[0], waited_s[2]) < 0.2
