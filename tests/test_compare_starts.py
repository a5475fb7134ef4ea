"""In which order a comparison starts its engines and runs its blocks, with engines and loads that are made up."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from harness import cli
from harness.compare import Options, compare
from harness.compare.load import BlockLoad
from harness.engine.engine import Engine, EngineIdentity, EngineSite
from harness.engine.launch import Launch
from harness.errors import UsageError
from harness.judge.blocks import load_declaration
from harness.judge.comparison import Comparison, judge_run
from harness.judge.paired import Slower
from harness.judge.records import Records
from harness.settings import Settings
from tests.judge.measured import request
from tests.judge.stored import store_block

REQUESTS = 30
CANARIES = {"asked": 5, "right": 5, "wrong": 0, "difference_max": 0.0, "tolerance": 0.001}
WRONG_UNDER_LOAD = {"right": 4, "wrong": 1, "difference_max": 0.4, "asked_under_load": 3, "wrong_under_load": 1}


@dataclass(slots=True)
class MadeUpEngine:
    """An engine that is ready at once."""

    incarnation: str
    is_stopped: bool = False
    endpoint: str = "http://127.0.0.1:1"
    log_path: Path = Path("/no/log")

    def exit_code(self) -> int | None:
        return 0 if self.is_stopped else None

    def parts(self) -> frozenset[str]:
        return frozenset()

    def wait_ready(self, limit_s: float) -> float:
        return 0.0

    def stop(self, grace_s: float = 10.0) -> int | None:
        self.is_stopped = True
        return 0


@dataclass(slots=True)
class MadeUpStarter:
    """Starts such engines and keeps them."""

    started: list[MadeUpEngine] = field(default_factory=list)
    most_at_once: int = 0

    def identity(self) -> EngineIdentity:
        return EngineIdentity(kind="reference", name="made-up", version="1", build="b", hardware="h")

    def open(self, site: EngineSite) -> None: ...

    def start(self, launch: Launch, *, incarnation: str) -> Engine:
        self.started.append(MadeUpEngine(incarnation))
        self.most_at_once = max(self.most_at_once, sum(not engine.is_stopped for engine in self.started))
        return self.started[-1]

    def close(self) -> None: ...


class MadeUpLoad(BlockLoad):
    """Writes blocks of answers that take 100 ms; what `canaries` says of a block by its number goes with it."""

    canaries: ClassVar[dict[int, dict[str, Any]]] = {}

    def send(self, engine: Engine, folder: Path, *, number: int, arm: str, pair: int, is_null: bool) -> None:
        assert engine.exit_code() is None
        ms = 100.0 + number % 3
        rows = Records.of(
            request(1000.0 * number + n * 0.1, ttft_ms=ms, gap_ms=ms / 10, number=n) for n in range(REQUESTS)
        )
        store_block(
            folder,
            rows,
            number=number,
            arm=arm,
            pair=pair,
            is_null=is_null,
            incarnation=engine.incarnation,
            schedule_sha256=self.plan(0).schedule_sha256,
            canaries=CANARIES | self.canaries.get(number, {}),
        )


@pytest.fixture(autouse=True)
def made_up(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send no load."""
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("harness.compare.runner.BlockLoad", MadeUpLoad)
    monkeypatch.setattr(MadeUpLoad, "canaries", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of a comparison."""

    run: Path
    comparison: Comparison
    starter: MadeUpStarter
    said: list[str]

    @property
    def blocks(self) -> list[tuple[str, int, str]]:
        """Return arm, pair and start of each block; the negative control has pair numbers of its own."""
        stored = [json.loads(path.read_text()) for path in sorted(self.run.glob("blocks/*/block.json"))]
        return [(block["arm"], block["pair"], block["incarnation"]) for block in stored]


def run(tmp_path: Path, **options: Any) -> Seen:
    starter, said = MadeUpStarter(), list[str]()
    asked = Options(**{"same": True, "canaries": False, "null_every": 0, "failure_budget": 0.05, **options})
    settings = Settings(engine="reference", results=tmp_path / "results")
    directory, comparison = compare(settings, asked, progress=said.append, starter=starter)
    assert all(engine.is_stopped for engine in starter.started)
    return Seen(run=directory, comparison=comparison, starter=starter, said=said)


def test_release_starts_engines_anew_in_every_pair_and_each_serves_several_blocks(tmp_path: Path) -> None:
    seen = run(tmp_path, profile="release", null_every=4)
    declared = load_declaration(seen.run)
    assert (declared.fresh, declared.blocks_per_arm, declared.blocks_per_start) == (True, 6, 3)
    first = [("old", 0, "old-1"), ("new", 0, "new-2"), ("new", 0, "new-3"), ("old", 0, "old-4")]  # A B B A
    second = [("new", 1, "new-5"), ("old", 1, "old-6"), ("old", 1, "old-7"), ("new", 1, "new-8")]
    assert seen.blocks[:24] == [block for block in first + second for _ in range(3)]
    control = [("old", 0, "old-17"), ("null", 0, "null-18"), ("null", 0, "null-19"), ("old", 0, "old-20")]
    assert seen.blocks[48:60] == [block for block in control for _ in range(3)]
    assert seen.starter.most_at_once == 1
    assert seen.comparison.answer is Slower.NO, seen.comparison.because
    assert seen.comparison.pairs == 6
    assert not [
        text for text in (seen.comparison.because, *seen.comparison.notes, *seen.said) if "started once" in text
    ]


def test_one_start_of_a_release_says_what_it_costs_everywhere(tmp_path: Path) -> None:
    seen = run(tmp_path, profile="release", fresh=False)
    assert [engine.incarnation for engine in seen.starter.started] == ["old-1", "new-2"]
    assert [arm for arm, _, _ in seen.blocks[:8]] == ["old", "new", "new", "old", "new", "old", "old", "new"]
    price = 'each side was started once: if starts scatter by 2 %, profile "release" then says yes in 14 % of the comparisons'
    assert any(line.startswith(price) for line in seen.said)
    assert price in seen.comparison.because
    assert any(note.startswith(price) for note in seen.comparison.notes)
    assert price in json.loads((seen.run / "verdict.json").read_text())["because"]
    assert price in (seen.run / "junit.xml").read_text().replace("&quot;", '"')
    assert price in judge_run(seen.run).because


@pytest.mark.parametrize(
    ("options", "starts", "blocks"),
    [
        ({}, 2, 1),  # of the whole comparison, and of each arm in a pair
        ({"fresh": True}, 16, 2),
        ({"fresh": True, "blocks_per_arm": 1}, 8, 1),
        ({"fresh": True, "blocks_per_start": 2}, 16, 4),
        ({"fresh": True, "blocks_per_arm": 2, "blocks_per_start": 2}, 8, 2),
        ({"blocks_per_arm": 3}, 2, 3),
    ],
)
def test_starts_and_blocks_of_other_profiles_are_as_asked(
    tmp_path: Path, options: dict[str, Any], starts: int, blocks: int
) -> None:
    seen = run(tmp_path, profile="nightly", **options)
    assert seen.comparison.pairs == 4
    assert len(seen.starter.started) == starts
    assert len(seen.blocks) == 2 * 4 * blocks


def test_wrong_answer_under_load_ends_it_within_its_pair_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeUpLoad, "canaries", {4: WRONG_UNDER_LOAD})
    seen = run(tmp_path, profile="release")
    assert seen.comparison.answer is Slower.INVALID
    assert "wrong_answers is 1 in 25 canaries (first in block 004-new: off by 0.4" in seen.comparison.because
    assert "1 of 3 under load, 0 of 22 beside it" in seen.comparison.because
    assert [arm for arm, _, _ in seen.blocks] == ["old"] * 3 + ["new"] * 2
    assert len(seen.starter.started) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"blocks_per_start": 0, "fresh": True}, "blocks_per_start must be at least 1, got 0"),
        ({"blocks_per_start": 2}, r"blocks_per_start needs fresh starts \(--fresh\)"),
        (
            {"profile": "release", "blocks_per_arm": 5, "blocks_per_start": 2},
            "blocks_per_arm is 5 and blocks_per_start 2: starts would be cut short",
        ),
    ],
)
def test_starts_that_cannot_be_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Options(**options)


def test_a_start_cannot_be_both_fresh_and_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "--engine", "reference", "--fresh", "--one-start"])
    assert ended.value.code == 3
    assert "not allowed with argument" in capsys.readouterr().err
