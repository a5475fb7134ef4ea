"""Find, before any engine is started, what is wrong with a checkpoint: headers, config, tokenizer, launch arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.checkpoint.survey import Checkpoint, survey
from harness.guards.consequences import with_consequence
from harness.guards.expected import architecture
from harness.guards.finding import BLOCKING, PreflightFinding, PreflightReport, Severity
from harness.guards.host import host_findings
from harness.guards.launch import launch_of
from harness.guards.launch_arguments import argument_findings, with_overrides
from harness.guards.launch_files import file_findings, has_other_tokenizer
from harness.guards.launch_line import line_of
from harness.guards.launch_options import Launch
from harness.guards.layout import layout_findings
from harness.guards.numpy_cache import numpy_cache_findings
from harness.guards.releases import Release, architectures, newest, release_of
from harness.guards.side_files import differences, side_file_findings
from harness.guards.structure import finding_of
from harness.guards.values import value_findings

__all__ = ["PreflightFinding", "PreflightReport", "Published", "Severity", "check", "examine"]

UNREAD = ("D01", "D02", "D03", "D16", "D20")  # structural findings after which tensors of a shard are not known
NOT_CHECKED = ": names and shapes were not checked"  # how findings end that say so
NOT_CHECKED_DEEP = f"{NOT_CHECKED} with transformers"
ORDER = {Severity.REFUSES: 0, Severity.SILENT: 1, Severity.RISK: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The publisher's manifest, and the key that its signature must fit, where there is one."""

    manifest: Path
    public_key: Path | None = None
    signature: Path | None = None


def check(
    path: Path,
    *,
    dtype: str = "auto",
    arguments: Sequence[str] = (),
    against: Path | None = None,
    read_tensors: bool = False,
    engine: str | None = None,
) -> tuple[PreflightFinding, ...]:
    """Return everything that is wrong with the checkpoint in `path`, the worst first; never raises for what is in it.

    Headers and small files are read; with `read_tensors` all values too. `dtype` and `arguments` are what the engine
    will be started with, and `engine` is its release (`vllm==0.32.0`; the newest known when left out); `against` is the
    running checkpoint, for changes that weights cannot show.

    Raises: UsageError when `engine` names no release, or `arguments` are one line that is not quoted right.
    """
    release = newest() if engine is None else release_of(engine)
    launch = launch_of(line_of(arguments), release)
    return examine(path, launch=launch, dtype=dtype, against=against, read_tensors=read_tensors).findings


def examine(
    path: Path,
    *,
    launch: Launch,
    dtype: str = "auto",
    against: Path | None = None,
    read_tensors: bool = False,
    deep: bool = False,
    published: Published | None = None,
    fail_on: frozenset[Severity] = BLOCKING,
    check_host: bool = False,
) -> PreflightReport:
    """Return the same with what could not be looked at; `launch` also says for which release.

    With `deep` names and shapes are also compared with the model that the installed transformers builds; with `check_host`
    port, shared memory and cache of this machine are looked at too.
    Raises: EnvironmentMissing when that, or what a signature needs, is not installed; UsageError when the manifest of
    `published` or its key cannot be used.
    """
    found = [*_findings(path, launch, dtype, against, read_tensors, deep), *_differences_to(path, published)]
    if check_host:
        found += host_findings(launch)
    findings = [with_consequence(finding, launch.release) for finding in found]
    return PreflightReport(
        checkpoint=path,
        engine=launch.release.label,
        findings=tuple(sorted(findings, key=lambda finding: ORDER[finding.severity])),
        unchecked=tuple(launch.unchecked),
        fail_on=fail_on,
    )


def _findings(
    path: Path, launch: Launch, dtype: str, against: Path | None, read_tensors: bool, deep: bool
) -> Iterator[PreflightFinding]:
    surveyed, defects = survey(path)
    structural = [finding_of(defect) for defect in defects]
    config = with_overrides(surveyed.config, launch)
    if launch.text("--load-format") == "sharded_state":  # names and shapes of its own, the same ones for every rank
        structural = [finding for finding in structural if finding.id != "D11"]
        checkpoint = replace(surveyed, config=config, shards=())
    else:
        checkpoint = replace(surveyed, config=config)
    yield from structural
    if path.is_dir():
        is_whole = not any(finding.id in UNREAD for finding in structural)
        yield from _architecture(checkpoint, launch.release)
        yield from _layout(checkpoint, is_whole=is_whole, deep=deep)
        for finding in side_file_findings(checkpoint):
            if not (has_other_tokenizer(launch) and "tokenizer" in f"{finding.seen} {finding.where}"):
                yield finding
    yield from argument_findings(checkpoint, launch, dtype=dtype)
    if launch.is_given:
        yield from file_findings(surveyed, launch, against=against)
    if read_tensors:
        to_fp16 = (launch.text("--dtype") or dtype) in ("float16", "half")
        yield from value_findings(surveyed, to_fp16=to_fp16)
        if launch.text("--load-format") == "npcache":
            yield from numpy_cache_findings(path)
    if against is not None:
        yield from differences(surveyed, survey(against)[0])


def _layout(checkpoint: Checkpoint, *, is_whole: bool, deep: bool) -> Iterator[PreflightFinding]:
    """Yield what names and shapes show; what both ways of knowing them say is said once."""
    by_formula = list(layout_findings(checkpoint, is_whole=is_whole))
    if not deep:
        yield from by_formula
        return
    from harness.guards.transformers_layout import deep_findings  # torch takes seconds to import

    built = list(deep_findings(checkpoint, is_whole=is_whole))
    if not any(finding.seen.endswith(NOT_CHECKED_DEEP) for finding in built):
        by_formula = [finding for finding in by_formula if not finding.seen.endswith(NOT_CHECKED)]
    said = {(finding.id, finding.where) for finding in by_formula}
    yield from by_formula
    yield from (finding for finding in built if (finding.id, finding.where) not in said)


def _differences_to(path: Path, published: Published | None) -> Iterator[PreflightFinding]:
    if published is not None:
        from harness.guards.manifest import manifest_findings  # hashing is not needed for anything else

        key, signature = published.public_key, published.signature
        yield from manifest_findings(path, published.manifest, public_key=key, signature=signature)


def _architecture(checkpoint: Checkpoint, release: Release) -> Iterator[PreflightFinding]:
    """Yield an architecture that the release does not implement; transformers may stand in for some."""
    named = architecture(checkpoint.config)
    if named is None or not release.is_read:
        return
    own, of_transformers = architectures(release)
    if named in own or "auto_map" in checkpoint.config:
        return
    stands_in = named in of_transformers
    yield PreflightFinding(
        id="C06",
        severity=Severity.RISK if stands_in else Severity.REFUSES,
        seen=f'architecture "{named[:100]}"' + (", which only transformers has" if stands_in else ""),
        expected=f"an architecture that {release.label} has",
        where='"config.json"',
        remedy="use a release that has it",
    )
