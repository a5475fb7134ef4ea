"""The timeline picture: what is drawn where, that labels keep apart, and that a lot of requests stays small."""

from __future__ import annotations

import re
from itertools import pairwise
from random import Random
from xml.etree import ElementTree

import pytest

from harness.guards.canary import Answer
from harness.observe.history import EventKind, RequestResult
from harness.report import panels, plots
from harness.report.svg import CHARACTER_WIDTH, LEFT, RIGHT, WIDTH, decades, log_ticks, round_up

KINDS = ("publish", "fault", "detection", "remedy", "recovery")
NS = "{http://www.w3.org/2000/svg}"


def drawn(record, **options):
    return ElementTree.fromstring(str(plots.timeline_svg(record, **options)))


def of_class(svg, name):
    return [element for element in svg.iter() if name in element.get("class", "").split()]


def words(svg):
    return [element.text or "" for element in svg.iter(f"{NS}text")]


def test_the_picture_is_one_well_formed_svg_with_a_title_and_words(unguarded, make_scenario) -> None:
    svg = drawn(make_scenario(unguarded()))
    assert svg.find(f"{NS}title").text == "Timeline of widened_tensor_on_restart, unguarded"
    description = svg.find(f"{NS}desc").text
    assert "Canary answers: 17 old, 4 neither" in description
    assert "publish new at 8.0 s" in description


def test_the_windows_are_those_that_claims_speak_of(unguarded, make_scenario) -> None:
    svg = drawn(make_scenario(unguarded()))
    edges = []
    for name in ("before", "faulty", "recovering", "after"):
        (shade,) = of_class(svg, f"w-{name}")
        left = float(shade.get("x"))
        edges.append((round(left), round(left + float(shade.get("width")))))
    assert edges[0][0] == LEFT
    assert edges[-1][1] == RIGHT
    assert all(abs(end - start) <= 1 for (_, end), (start, _) in pairwise(edges))
    publish = LEFT + (RIGHT - LEFT) * 8.0 / 36.0
    assert abs(edges[0][1] - publish) <= 1


def test_a_scenario_without_remedy_has_no_recovering_window(unguarded, make_scenario) -> None:
    story = unguarded()
    story.events = [e for e in story.events if e.kind not in (EventKind.REMEDY_STARTED, EventKind.REMEDY_ENDED)]
    assert of_class(drawn(make_scenario(story)), "w-recovering") == []


def test_every_failed_request_is_a_cross_and_every_canary_has_the_shape_of_its_answer(unguarded, make_scenario) -> None:
    record = make_scenario(unguarded())
    svg = drawn(record)
    failed = [r for r in record.history.requests if r.result is not RequestResult.OK]
    crosses = of_class(svg, "failed")[0].get("d")
    assert crosses.count("M") == len(failed)
    assert of_class(svg, "a-neither")[0].get("d").count("M") == 4
    assert of_class(svg, "a-new") == []
    assert any(word == "canary: neither (4)" for word in words(svg))


def test_errors_are_stacked_by_class_and_counted_in_the_legend(unguarded, make_scenario) -> None:
    record = make_scenario(unguarded())
    svg = drawn(record)
    no_server = sum(r.result is RequestResult.NO_ENDPOINT for r in record.history.requests)
    assert f"no server ({no_server})" in words(svg)
    assert of_class(svg, "e-no-server")
    assert of_class(svg, "e-too-late") == []


def test_every_result_has_a_class_of_error() -> None:
    assert set(panels.ERROR_CLASSES) == set(RequestResult) - {RequestResult.OK}


def test_an_engine_that_died_is_marked_and_one_that_lies_about_health_shows_it(unguarded, make_scenario) -> None:
    story = unguarded()
    story.event(17.0, EventKind.HEALTH, incarnation="new-2", status=0, took_ms=2.0)
    svg = drawn(make_scenario(story))
    assert "dead" in words(svg)
    assert len(of_class(svg, "end-dead")) == 1
    assert of_class(svg, "h-unhealthy")
    assert "health not 200" in words(svg)


@pytest.mark.parametrize("seed", range(12))
def test_labels_of_moments_never_overlap_and_stay_inside(seed, unguarded, make_scenario) -> None:
    random = Random(seed)
    story = unguarded()
    for _ in range(6):
        name = "x" * random.randint(3, 40)
        story.event(
            random.choice([random.uniform(0, 36), 35.9, 8.0]), EventKind.FAULT_INJECTED, fault=name, proved=True
        )
    svg = drawn(make_scenario(story))
    boxes = []
    for label in of_class(svg, "moment"):
        x, y, width = float(label.get("x")), float(label.get("y")), CHARACTER_WIDTH * len(label.text)
        left = x - width if "end" in label.get("class").split() else x
        boxes.append((left, left + width, y))
    assert len(boxes) >= 6
    assert all(left >= 0 and right <= WIDTH + 6 for left, right, _ in boxes)
    for index, (left, right, y) in enumerate(boxes):
        for other_left, other_right, other_y in boxes[index + 1 :]:
            assert abs(y - other_y) > 12 or right <= other_left or other_right <= left


@pytest.mark.parametrize("seed", range(24))
def test_no_line_crosses_a_label(seed, unguarded, make_scenario) -> None:
    random = Random(seed)
    story = unguarded()
    for number in range(4):
        name = f"{number}" + "x" * random.randint(3, 30)
        story.event(random.uniform(0, 36), EventKind.FAULT_INJECTED, fault=name, proved=True)
    svg = drawn(make_scenario(story))
    lines = [element.get("d") for kind in KINDS for element in of_class(svg, f"m-{kind}")]
    starts = [tuple(map(float, re.fullmatch(r"M([\d.]+) ([\d.]+)V[\d.]+", line).groups())) for line in lines]
    for label in of_class(svg, "moment"):
        x, y, width = float(label.get("x")), float(label.get("y")), CHARACTER_WIDTH * len(label.text)
        left = x - width if "end" in label.get("class").split() else x
        assert not [line for line, top in starts if left < line < left + width and top < y - 1], label.text


def test_dots_are_thinned_with_the_slowest_kept_and_the_legend_says_so(unguarded, make_scenario) -> None:
    story = unguarded(rate_rps=60.0)
    story.request(30.0, 9.5, "old-3")
    record = make_scenario(story)
    answered = sum(r.result is RequestResult.OK and not r.is_canary for r in record.history.requests)
    svg = drawn(record, dots_max=300)
    dots = of_class(svg, "dot")[0].get("d")
    assert 150 <= dots.count("M") <= 450
    assert any(re.fullmatch(rf"answered \(\d+ of {answered:,} drawn, slowest kept\)", word) for word in words(svg))
    highest = min(float(y) for _, y in re.findall(r"M([\d.]+) ([\d.]+)h0", dots))
    whole = of_class(drawn(record, dots_max=100_000), "dot")[0].get("d")
    assert highest == min(float(y) for _, y in re.findall(r"M([\d.]+) ([\d.]+)h0", whole))


def test_few_dots_are_all_drawn(unguarded, make_scenario) -> None:
    record = make_scenario(unguarded())
    answered = sum(r.result is RequestResult.OK and not r.is_canary for r in record.history.requests)
    assert f"answered ({answered})" in words(drawn(record))


def test_a_history_without_requests_or_load_is_drawn(make_scenario, unguarded) -> None:
    story = unguarded()
    story.requests.clear()
    assert "no request was recorded" in words(drawn(make_scenario(story)))
    story.events = story.events[:2]
    assert drawn(make_scenario(story)).tag == f"{NS}svg"


def test_answers_of_canaries_before_traffic_are_drawn_among_the_guards(unguarded, make_scenario) -> None:
    svg = drawn(make_scenario(unguarded()))
    assert len(of_class(svg, "g-old")) == 1


def test_an_ambiguous_answer_is_not_drawn_as_a_right_one(unguarded, make_scenario) -> None:
    story = unguarded()
    story.request(30.0, 0.2, "old-3", answer=Answer.AMBIGUOUS)
    assert of_class(drawn(make_scenario(story)), "a-ambiguous")[0].get("d").count("a4 4") == 2


@pytest.mark.parametrize(("value", "rounded"), [(0.9, 1), (1, 1), (1.1, 2), (3, 5), (7, 10), (0.04, 0.05), (230, 500)])
def test_round_up(value, rounded) -> None:
    assert round_up(value) == pytest.approx(rounded)


@pytest.mark.parametrize("latencies", [[], [0.1], [0.0001, 900.0], [0.3, 0.31]])
def test_a_log_axis_holds_its_values_and_has_ticks(latencies) -> None:
    low, high = decades(latencies)
    assert all(low <= latency <= high for latency in latencies)
    assert 2 <= len(log_ticks(low, high)) <= 12


def test_guards_that_acted_before_the_load_take_no_lane(unguarded, make_scenario) -> None:
    story = unguarded()
    story.events = [e for e in story.events if e.kind is not EventKind.CANARY_CHECKED]
    story.event(-2.0, EventKind.GUARD_PASSED, guard="preflight", took_s=0.1)
    assert "guards" not in words(drawn(make_scenario(story)))
