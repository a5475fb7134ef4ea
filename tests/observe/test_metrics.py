"""Reading Prometheus text, vLLM's own page among it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.observe import metrics
from harness.observe.metrics import parse, pick, scrape

PAGE = (Path(__file__).parent / "logs" / "vllm-0.32.0.metrics").read_text(encoding="utf-8")


def test_the_figures_of_a_real_page_of_vllm() -> None:
    values = pick(PAGE)
    assert values["num_requests_running"] == 0
    assert values["num_requests_waiting"] == 0
    assert values["engine_steps"] == 4
    assert values["iteration_tokens_total"] == 7
    assert values["generation_tokens_total"] == 4
    assert values["kv_cache_usage_perc"] == 0
    assert values["prefix_cache_queries"] == 3
    assert values["prefix_cache_hits"] == 0
    assert values["request_success"] == 1
    assert values["request_success_length"] == 1
    assert values["request_success_abort"] == 0
    assert not [name for name in values if "created" in name or "bucket" in name]


def test_engines_of_one_server_are_added_up() -> None:
    text = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
    assert pick(text) == {"num_requests_running": 5.0}


def test_labels_with_quotes_commas_and_braces() -> None:
    (sample,) = parse('a_b:c{x="1,\\"2\\"}",y="\\n\\\\"} 4e3 1700000000000')
    assert sample.name == "a_b:c"
    assert sample.labels == {"x": '1,"2"}', "y": "\n\\"}
    assert sample.value == 4000.0


@pytest.mark.parametrize("text", ["", "# HELP a b", "<html>", "a b c", "a", "\x00\xff", "vllm:x{ 1", "1a 2"])
def test_what_is_no_sample_is_left_out(text) -> None:
    assert list(parse(text)) == []


def test_values_that_are_no_figures_are_left_out() -> None:
    assert pick("vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n") == {}


def test_a_reason_from_outside_cannot_become_any_name() -> None:
    text = 'vllm:request_success_total{finished_reason="<script>"} 1\n'
    assert pick(text) == {"request_success": 1.0}


def test_scrape_sends_the_key_and_asks_once(stand) -> None:
    assert scrape(stand.endpoint, api_key="k") == {"num_requests_running": 1.0}
    assert stand.asked == [("/metrics", "Bearer k")]


def test_scrape_says_what_it_got_instead_of_a_page(stand) -> None:
    stand.status = 503
    with pytest.raises(ValueError, match="HTTP 503, expected 200"):
        scrape(stand.endpoint)
    assert len(stand.asked) == 1


def test_scrape_ends_when_the_answer_never_does(stand) -> None:
    stand.drip.set()
    with pytest.raises(TimeoutError, match=r"not read within 0\.3 s"):
        scrape(stand.endpoint, limit_s=0.3)


def test_scrape_ends_when_no_answer_comes(stand) -> None:
    stand.hold.set()
    with pytest.raises(OSError, match="timed out"):
        scrape(stand.endpoint, limit_s=0.2)


def test_scrape_refuses_a_page_without_end(stand, monkeypatch) -> None:
    monkeypatch.setattr(metrics, "BODY_BYTES_MAX", 100)
    stand.metrics = b"# x\n" * 100
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        scrape(stand.endpoint)
