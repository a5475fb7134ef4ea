"""Scenarios are found in test modules as pytest would find them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.damage_command import fault_from
from harness.errors import UsageError
from harness.judge.finding_texts import text_for
from harness.judge.reproduce import by_hand
from harness.recording import declared_of
from harness.suite import collect, collect_by_file

MODULE = '''
"""What goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from harness import Scenario, claims, load, models
from harness.faults import Injected


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDamage:
    name: ClassVar[str] = "own_damage"
    fault_id: ClassVar[str] = "D15"

    def parameters(self) -> dict[str, Any]:
        return {}

    def damage(self, target, *, old, random) -> Injected:
        raise NotImplementedError


SCENARIO = Scenario(
    name="own_fault",
    old=models.tiny_llama(1),
    new=models.tiny_llama(2),
    faults=(OwnDamage(),),
    load=load.steady(rate_rps=1.0),
    unguarded=(claims.recovered(within_s=1.0),),
    guarded=(claims.recovered(within_s=1.0),),
)
OTHERS = (SCENARIO,)
'''


@pytest.fixture(autouse=True)
def _same_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_with_a_fault_of_its_own_is_collected(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(MODULE)
    (scenario,) = collect([tmp_path])
    assert scenario.name == "own_fault"
    assert scenario.about == "What goes wrong."


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("import a_module_that_is_not_there")
    with pytest.raises(UsageError, match=r"test_own\.py.*cannot be imported"):
        collect([tmp_path])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('not\\nso')", "ValueError: not so"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(1)", "SystemExit: 1"),
        ("import pytest; pytest.skip('not here', allow_module_level=True)", "Skipped: not here"),
        ("def :", "invalid syntax"),
        ("from harness import Scenario, models; models.tiny_llama(layers=0)", ""),
    ],
)
def test_a_module_that_raises_is_named_with_what_it_raised(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "test_own.py").write_text(text)
    with pytest.raises(UsageError, match=r'test_own\.py" cannot be imported: ') as raised:
        collect([tmp_path])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_a_finding_says_to_type_makes_the_fault_of_its_scenario() -> None:
    tried = set()
    for file, scenarios in collect_by_file([Path(__file__).parents[1] / "scenarios"]).items():
        for scenario in scenarios:
            steps = by_hand(declared_of(scenario, file), text_for(scenario.name, ""))
            for step in steps:
                if not step.startswith("harness damage"):
                    continue
                words = shlex.split(step)
                settings = [words[number + 1] for number, word in enumerate(words) if word == "--set"]
                typed = fault_from(words[words.index("--fault") + 1], settings)
                assert typed in scenario.faults, step
                tried.add(typed.name)
    assert len(tried) > 20, tried
    assert "adapter_prefix" in tried
