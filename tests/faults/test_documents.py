"""The pages about faults say what the code does: they are made from it, and its tables are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from damage_cases import DAMAGES

from harness.faults import FAULTS, Damage
from harness.faults.catalogue import CATALOGUE
from harness.faults.documents import faults_page, gaps, ids_page, is_damage, main, parameters_of, rows_of
from harness.faults.rows import ROWS

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.mark.parametrize(("page", "made"), [("fault-ids.md", ids_page), ("faults.md", faults_page)])
def test_a_page_is_what_the_tables_say(page: str, made: object, tmp_path: Path) -> None:
    main([str(tmp_path)])
    assert (tmp_path / page).read_text() == made()  # type: ignore[operator]
    assert (DOCS / page).read_text() == made(), "run: python -m harness.faults.documents docs"  # type: ignore[operator]


def test_every_fault_is_in_the_catalogue_and_every_id_on_the_list() -> None:
    assert set(CATALOGUE) == set(FAULTS)
    for name in FAULTS:
        assert rows_of(name), name
        assert set(rows_of(name)) <= set(ROWS), name


def test_every_row_has_a_fault_or_says_why_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    last = {"D": 23, "C": 12, "L": 6, "M": 9, "K": 5, "U": 9, "P": 6, "N": 1}
    assert list(ROWS) == [f"{letter}{number:02}" for letter, count in last.items() for number in range(1, count + 1)]
    assert len(ROWS) == 71
    assert all(gaps().values()), [row for row, why in gaps().items() if not why]
    assert not {row for row in gaps() if row[0] in "DCL"}

    monkeypatch.delitem(FAULTS, "presharded_state")

    assert gaps()["D23"] == "", "nobody wrote a reason for a row that had a fault"
    assert "| **nothing** |" in ids_page()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damage_carries_an_id_that_its_docstring_names(damage: Damage) -> None:
    assert damage.fault_id in (*rows_of(damage.name), "C02")


def test_every_entry_says_what_how_and_where() -> None:
    for name, entry in CATALOGUE.items():
        assert entry.what.endswith("."), name
        assert entry.by_hand, name
        for report in entry.reports:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report), f"{name}: {report}"


def test_parameters_are_shown_as_they_are_given() -> None:
    assert parameters_of("widen_tensor") == "tensor=STR, dim=INT, by=INT, at=start"
    assert parameters_of("mismatched_config") == "changes=JSON"
    assert parameters_of("changed_chat_template") == "template=TEXT"
    assert parameters_of("stale_index") == ""
    assert is_damage("widen_tensor")
    assert not is_damage("slow_sync")
