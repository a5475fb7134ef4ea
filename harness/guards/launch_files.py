"""Check what a launch says about files: the load format, the tokenizer, the model's path and name, its environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from harness.checkpoint.survey import Checkpoint
from harness.guards.finding import PreflightFinding, Severity, shortened
from harness.guards.launch_options import WHERE, Launch
from harness.guards.releases import names_known
from harness.guards.side_files import TOKENIZER_FILES

NOT_SET = ("auto", "hf", "mistral")  # the survey of the directory says what these find
PATTERNS = {  # which files the loader looks for, in order, until one pattern matches
    "safetensors": (".safetensors",),
    "fastsafetensors": (".safetensors",),
    "instanttensor": (".safetensors",),
    "npcache": (".bin", ".pt"),
    "pt": (".pt",),
}
SCALE = ".attn._k_scale"
RANK_FILE = re.compile(r"model-rank-(\d{1,6})-part-\d{1,6}\.safetensors")


def file_findings(checkpoint: Checkpoint, launch: Launch, *, against: Path | None) -> Iterator[PreflightFinding]:
    """Yield what does not fit between the launch and the files beside the weights."""
    names = _names(checkpoint.path)
    yield from _load_format(launch, names, checkpoint)
    yield from _tokenizer(launch)
    yield from _model(checkpoint.path, launch, against)
    known = names_known("variables", launch.release.read_as)
    for name in launch.variables:
        if name.startswith("VLLM_") and name not in known and launch.release.is_read:
            stops = launch.flags.get("--fail-on-environ-validation")
            yield _finding(
                "L02",
                f"variable {name}",
                f"a variable that {launch.release.label} knows",
                "leave it out, or correct its name",
                Severity.REFUSES if stops else Severity.RISK,
            )


def has_other_tokenizer(launch: Launch) -> bool:
    """Say whether the engine takes its tokenizer from elsewhere than the checkpoint, or takes none."""
    return "--tokenizer" in launch.values or launch.flags.get("--skip-tokenizer-init", False)


def _finding(
    fault_id: str, seen: str, expected: str, remedy: str, severity: Severity, *, where: str = WHERE
) -> PreflightFinding:
    return PreflightFinding(id=fault_id, severity=severity, seen=seen, expected=expected, where=where, remedy=remedy)


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (OSError, ValueError):
        return []


def _load_format(launch: Launch, names: list[str], checkpoint: Checkpoint) -> Iterator[PreflightFinding]:
    asked = launch.text("--load-format")
    if asked is None or asked in NOT_SET:
        return
    if asked not in names_known("load_formats", launch.release.read_as):
        yield _finding(
            "L01",
            f"--load-format {shortened(asked)}",
            f"a load format of {launch.release.label}, or of a plug-in",
            "make sure that the engine's image has the plug-in",
            Severity.RISK,
        )
    elif asked == "dummy":
        yield _finding(
            "D15",
            "--load-format dummy, which reads no weights at all",
            "the weights of the checkpoint",
            "leave --load-format out",
            Severity.SILENT,
        )
    elif asked == "ipc_cache":
        yield _finding(
            "K05",
            "--load-format ipc_cache, which knows a checkpoint by its headers only",
            "a weight cache daemon started after this checkpoint was published",
            "restart the daemon (vllm preload) at every rollout",
            Severity.RISK,
        )
    elif asked == "sharded_state":
        yield from _ranks(launch, names, checkpoint)
    elif asked in PATTERNS:
        found = next((suffix for suffix in PATTERNS[asked] if any(name.endswith(suffix) for name in names)), None)
        if found is None:
            yield _finding(
                "D13",
                f"--load-format {asked}, no {' or '.join('*' + suffix for suffix in PATTERNS[asked])}",
                "weights in the format that is asked for",
                "leave --load-format out, or publish that format",
                Severity.REFUSES,
            )
        elif asked == "npcache":
            yield from _npcache(names, checkpoint.path, found)


def _npcache(names: list[str], path: Path, suffix: str) -> Iterator[PreflightFinding]:
    is_stale = "np" in names and _changed_ns(path / "np") < max(
        (_changed_ns(path / name) for name in names if name.endswith(suffix)), default=0
    )
    yield _finding(
        "D22",
        "np/ is older than the weights" if is_stale else "--load-format npcache, which writes np/ into the checkpoint",
        "no np/ of another release" if is_stale else "a load format that keeps nothing",
        "delete np/ before every start, or leave --load-format out",
        Severity.SILENT if is_stale else Severity.RISK,
        where='"np"' if is_stale else WHERE,
    )


def _ranks(launch: Launch, names: list[str], checkpoint: Checkpoint) -> Iterator[PreflightFinding]:
    ranks = {int(match[1]) for match in map(RANK_FILE.fullmatch, names) if match}
    size, stages = launch.number("--tensor-parallel-size", 1), launch.number("--pipeline-parallel-size", 1)
    if size is None or stages is None:
        return
    wanted = set(range(min(size, 10**6)))
    if ranks != wanted and stages == 1:
        # Each rank then finds its file, which holds less than its share of every parameter. A state of the engine's own
        # has the scales of its attention in it as well; one without them is not taken.
        has_scales = any(tensor.name.endswith(SCALE) for tensor in checkpoint.tensors)
        is_read_in_part = wanted < ranks and has_scales
        yield _finding(
            "D23",
            f"files of {len(ranks)} ranks ({', '.join(map(str, sorted(ranks)[:8])) or 'none'})"
            + ("" if has_scales or not wanted <= ranks else ", without attention scales"),
            f"model-rank-0 to model-rank-{size - 1}, for tensor parallel size {size}",
            "save the state again for this parallel size",
            Severity.SILENT if is_read_in_part else Severity.REFUSES,
            where="weight files",
        )


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


def _tokenizer(launch: Launch) -> Iterator[PreflightFinding]:
    named = launch.text("--tokenizer")
    if named and _is_path(named):
        inner = _names(Path(named))
        if not any(name in inner for name in TOKENIZER_FILES):
            yield _finding(
                "C12",
                f'--tokenizer "{shortened(named)}", which holds no tokenizer here',
                f"a directory with one of {', '.join(TOKENIZER_FILES)}",
                "correct the path, or run this where the engine will run",
                Severity.RISK,
            )
    template = launch.text("--chat-template")
    if template and _is_path(template) and not os.path.isfile(template):
        yield _finding(
            "C10",
            f'--chat-template "{shortened(template)}", which is not there',
            "a file",
            "correct the path, or run this where the engine will run",
            Severity.RISK,
        )


def _is_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) and not any(character in text for character in "\0\n{")


def _model(path: Path, launch: Launch, against: Path | None) -> Iterator[PreflightFinding]:
    named = launch.model
    is_here = named is not None and _is_path(named) and os.path.isdir(named)
    if is_here and os.path.realpath(named or "") != os.path.realpath(path):
        yield _finding(
            "L06",
            f'the launch serves "{shortened(named)}"',
            f'"{path}", the checkpoint that is checked here',
            "check the directory that will be served",
            Severity.RISK,
        )
    served = launch.values.get("--served-model-name", ())
    if against is not None and served and not any(path.resolve().name in name for name in served):
        yield _finding(
            "L06",
            f"served as {', '.join(map(shortened, served[:3]))}, like the running checkpoint",
            "a name by which clients can tell the two checkpoints apart",
            "put the version into a second --served-model-name, or rely on the canary",
            Severity.RISK,
        )
