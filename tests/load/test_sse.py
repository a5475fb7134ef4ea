"""Bytes in, one result out: the same however the network cuts them."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.load.sse import IDENTITY, Completion, EventDecoder, StreamFault, check_identity
from harness.observe.history import RequestResult


def token(text: str, finish: str | None = None) -> bytes:
    message = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    return b"data: " + json.dumps(message, ensure_ascii=False).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\r\n\r\n'
DONE = b"data: [DONE]\n\n"
PARTS = st.sampled_from(
    [
        token("a"),
        token("é\u2028𝄞"),
        token("", "length"),
        token("", "abort"),
        USAGE,
        DONE,
        b": ping\n\n",
        b"event: x\nid: 3\nretry: 10\n",
        b"data: {}\n\n",
        b'data: {"error": "boom"}\n\n',
        b"data: \xff\n\n",
        b"nonsense\n",
        b'data: {"choices":\ndata: []}\n\n',
        b"data: [DO",
    ]
)


def run(chunks: list[bytes], max_tokens: int = 2) -> tuple[RequestResult, str, int, int, str]:
    completion = Completion(max_tokens)
    try:
        for chunk in chunks:
            completion.feed(chunk, 1)
        completion.check_end()
        result, because = RequestResult.OK, ""
    except StreamFault as fault:
        result, because = fault.result, fault.because
    return result, because, len(completion.token_ns), completion.output_tokens, completion.output_sha256


@settings(deadline=None)
@given(parts=st.lists(PARTS, max_size=8), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_rechunking_gives_the_same_result(parts: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(parts)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[start:end] for start, end in pairwise(edges)]

    assert run(chunks) == run([stream]) == run([bytes([byte]) for byte in stream])


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_make_it_fall_over(stream: bytes) -> None:
    result, *_ = run([stream])

    assert result in (RequestResult.MALFORMED, RequestResult.TRUNCATED_PROTOCOL)


def test_a_whole_answer_is_ok() -> None:
    result, because, tokens, counted, digest = run([token("a"), token("b"), token("", "length"), USAGE, DONE])

    assert (result, because, tokens, counted) == (RequestResult.OK, "", 2, 2)
    assert len(digest) == 64


@pytest.mark.parametrize(
    ("chunks", "result", "because"),
    [
        (
            [token("a"), token("b", "length"), USAGE],
            RequestResult.TRUNCATED_PROTOCOL,
            "without .*DONE.* after 2 of 2 tokens",
        ),
        ([token("a"), token("b"), USAGE, DONE], RequestResult.TRUNCATED_PROTOCOL, "no finish_reason"),
        (
            [token("a", "length"), DONE],
            RequestResult.TRUNCATED_PROTOCOL,
            "1 token events, no usage given, 2 were asked",
        ),
        ([token("a"), token("", "error")], RequestResult.INBAND_ERROR, "finish_reason"),
        ([b'data: {"error": {"message": "died"}}\n\n', DONE], RequestResult.INBAND_ERROR, "died"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], RequestResult.MALFORMED, "not JSON"),
        ([b'data: {"choices": [], "usage": {"completion_tokens": 1e999}}\n\n'], RequestResult.MALFORMED, "completion"),
    ],
)
def test_what_is_wrong_is_said(chunks: list[bytes], result: RequestResult, because: str) -> None:
    seen, seen_because, *_ = run(chunks)

    assert seen is result
    assert re.search(because, seen_because)


def test_the_first_token_is_the_first_with_text() -> None:
    completion = Completion(2)
    completion.feed(b": ping\n\n", 1)
    completion.feed(token(""), 2)
    completion.feed(token("a"), 3)

    assert completion.first_token_ns == 3
    assert completion.token_ns == [3]


def with_ids(*batches: list[int]) -> Completion:
    completion = Completion(sum(map(len, batches)))
    for at_ns, batch in enumerate(batches, start=1):
        message = {"choices": [{"index": 0, "text": "", "token_ids": batch}]}
        completion.feed(b"data: " + json.dumps(message).encode() + b"\n\n", at_ns)
    return completion


def test_token_ids_count_where_the_text_is_held_back() -> None:
    one_by_one, together = with_ids([7], [], [8], [9]), with_ids([7, 8], [9])

    assert one_by_one.token_ns == [1, 3, 4]
    assert one_by_one.output_sha256 == together.output_sha256 != with_ids([7], [8], [10]).output_sha256
    assert one_by_one.output_sha256 != ""


def test_tokens_that_print_as_nothing_still_began_but_are_no_content() -> None:
    completion = Completion(2)
    completion.feed(token("") + token("", "length") + USAGE + DONE, 7)
    with pytest.raises(StreamFault, match="neither text nor token ids"):
        completion.check_end()

    assert completion.first_token_ns == 7
    assert completion.output_sha256 == ""


def test_token_ids_and_usage_must_agree() -> None:
    completion = with_ids([7], [8], [9])
    completion.feed(token("", "length") + USAGE + DONE, 9)
    completion.max_tokens = 2
    with pytest.raises(StreamFault, match="3 token ids, but the server counts 2 tokens") as caught:
        completion.check_end()

    assert caught.value.result is RequestResult.WRONG_CONTENT


@pytest.mark.parametrize("name", IDENTITY)
def test_what_answers_must_not_change_within_a_stream(name: str) -> None:
    seen: dict[str, object] = {}
    check_identity({name: "a"}, seen, model="")
    check_identity({}, seen, model="")
    check_identity({name: None}, seen, model="")
    check_identity({name: "a"}, seen, model="")
    with pytest.raises(StreamFault, match=f'"{name}" was "a" and is "b"') as caught:
        check_identity({name: "b"}, seen, model="")

    assert caught.value.result is RequestResult.MIXED_VERSION


def test_another_model_than_asked_is_named() -> None:
    with pytest.raises(StreamFault, match='model "m" was asked, "other" answered') as caught:
        check_identity({"model": "other"}, {}, model="m")

    assert caught.value.result is RequestResult.WRONG_MODEL


def test_after_the_end_mark_nothing_counts() -> None:
    assert run([token("a"), token("b", "length"), USAGE, DONE, b'data: {"error": "late"}\n\n'])[0] is RequestResult.OK


def test_data_over_several_lines_is_one_event() -> None:
    assert list(EventDecoder().feed(b"data: a\ndata:b\n\ndata: c\n")) == ["a\nb"]
