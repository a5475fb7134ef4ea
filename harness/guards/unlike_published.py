"""What each difference to the published checkpoint means for a rollout: by the kind of file it is in."""

from __future__ import annotations

from harness.errors import CheckpointDefect
from harness.guards.finding import PreflightFinding, Severity, shortened

PUBLISH_AGAIN = "copy the file again from where it was published"
REMOVE = "publish into a new, empty directory, so that nothing of another release is left in it"

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")
# What an engine reads beside the weights: the row of the fault taxonomy of another one being there.
SERVED: dict[str, str] = {
    "config.json": "C05",
    "generation_config.json": "C11",
    "tokenizer.json": "C09",
    "tokenizer.model": "C09",
    "added_tokens.json": "C09",
    "special_tokens_map.json": "C09",
    "merges.txt": "C09",
    "vocab.json": "C09",
    "vocab.txt": "C09",
    "tekken.json": "C09",
    "tokenizer_config.json": "C10",
    "chat_template.jinja": "C10",
    "chat_template.json": "C10",
}
PROGRAM_SUFFIX = ".py"


def absent(name: str) -> PreflightFinding:
    """Return the finding of a published file that is not there."""
    if _is_weight(name):
        return _finding("D03", Severity.SILENT, name, "absent", "every file that was published", PUBLISH_AGAIN)
    severity = Severity.SILENT if _is_served(name) else Severity.RISK
    return _finding("D19", severity, name, "absent", "every file that was published", PUBLISH_AGAIN)


def surplus(name: str) -> PreflightFinding:
    """Return the finding of a file that was not published."""
    if _is_weight(name):
        fault_id, severity = "D11", Severity.SILENT
    elif _is_served(name):
        fault_id, severity = _served_id(name), Severity.SILENT
    else:
        fault_id, severity = "D19", Severity.RISK
    return _finding(fault_id, severity, name, "is there, but was not published", "published files only", REMOVE)


def changed(
    name: str, how: str, *, tensor: str | None = None, byte: int | None = None, is_harmless: bool = False
) -> PreflightFinding:
    """Return the finding of a file with other content; `byte` is where in the file the tensor begins."""
    if _is_weight(name):
        fault_id, severity = "D15", Severity.SILENT
    elif _is_served(name):
        fault_id, severity = _served_id(name), Severity.SILENT
    else:
        fault_id, severity = "D19", Severity.RISK
    if is_harmless:
        severity = Severity.RISK
    where = f'"{name}"'
    if tensor is not None:
        where += f', tensor "{shortened(tensor)}"'
    if byte is not None:
        where += f", byte {byte:,}"
    return PreflightFinding(
        id=fault_id,
        severity=severity,
        seen=shortened(how),
        expected="the content that was published",
        where=where,
        remedy=PUBLISH_AGAIN,
    )


def unreadable(name: str, defect: CheckpointDefect) -> PreflightFinding:
    """Return the finding of a published file that cannot be read to its end."""
    seen = f"{defect.reason}: {defect.detail}"
    return _finding("D20", Severity.REFUSES, name, seen, "a file that can be read to its end", PUBLISH_AGAIN)


def unusable(name: str, seen: str, expected: str) -> PreflightFinding:
    """Return the finding of a manifest with which nothing can be verified."""
    remedy = "fetch the manifest again from where the checkpoint was published, with its signature"
    return _finding("D19", Severity.SILENT, name, seen, expected, remedy)


def _finding(fault_id: str, severity: Severity, name: str, seen: str, expected: str, remedy: str) -> PreflightFinding:
    return PreflightFinding(
        id=fault_id,
        severity=severity,
        seen=shortened(seen),
        expected=expected,
        where=f'"{shortened(name)}"',
        remedy=remedy,
    )


def _is_weight(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES)


def _is_served(name: str) -> bool:
    return name in SERVED or name.endswith(PROGRAM_SUFFIX)


def _served_id(name: str) -> str:
    return SERVED.get(name, "C06")
