"""Check what lies beside the weights: tokenizer, special ids, generation defaults, and what changed since the last release."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.checkpoint.side_file import read_json
from harness.checkpoint.survey import Checkpoint
from harness.errors import CheckpointDefect
from harness.guards.finding import PreflightFinding, Severity, shortened
from harness.guards.token_ids import id_without_embedding

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
EMBEDDINGS = "model.embed_tokens.weight"
NO_MEANING = ("transformers_version", "_name_or_path", "use_cache", "_from_model_config", "_commit_hash")
SEEN_IN_WEIGHTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "tie_word_embeddings",
    "vocab_size",
    "torch_dtype",
    "dtype",
)
COPY_AGAIN = "copy the file again from where it was published"
PAIR = "publish tokenizer, config and weights of one release together"


def side_file_findings(checkpoint: Checkpoint) -> Iterator[PreflightFinding]:
    """Yield what is wrong with tokenizer and generation defaults."""
    path = checkpoint.path
    rows = _embedding_rows(checkpoint)
    if not any(os.path.lexists(path / name) for name in TOKENIZER_FILES):
        yield PreflightFinding(
            id="D19",
            severity=Severity.REFUSES,
            seen="no tokenizer",
            expected=f"one of {', '.join(TOKENIZER_FILES)}",
            where=f'"{path.name}"',
            remedy=COPY_AGAIN,
        )
    contents: dict[str, Mapping[str, Any]] = {}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if os.path.lexists(path / name):
            try:
                if name == "tokenizer.json":
                    beyond = id_without_embedding(path / name, rows)
                    if beyond is not None and rows is not None:
                        yield _beyond(f"token id {beyond}", name, rows)
                else:
                    contents[name] = read_json(path / name)
            except (CheckpointDefect, ValueError) as error:
                detail = error.detail if isinstance(error, CheckpointDefect) else error
                yield PreflightFinding(
                    id="C12",
                    severity=Severity.REFUSES,
                    seen=shortened(detail),
                    expected="a JSON object",
                    where=f'"{name}"',
                    remedy=COPY_AGAIN,
                )
    if rows is not None:
        yield from _special_ids_beyond(rows, checkpoint.config, contents.get("generation_config.json", {}))


def _embedding_rows(checkpoint: Checkpoint) -> int | None:
    """Return how many token ids have an embedding: by the weights, else by the config."""
    for tensor in reversed(checkpoint.tensors):
        if tensor.name == EMBEDDINGS and tensor.shape:
            return tensor.shape[0]
    rows = checkpoint.config.get("vocab_size")
    return rows if type(rows) is int else None


def _special_ids_beyond(
    rows: int, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> Iterator[PreflightFinding]:
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        for key in SPECIAL_IDS:
            value = values.get(key)
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int and number >= rows:
                    yield _beyond(f"{key} {shortened(number)}", name, rows)


def _beyond(seen: str, name: str, rows: int) -> PreflightFinding:
    return PreflightFinding(
        id="C09",
        severity=Severity.SILENT,
        seen=seen,
        expected=f"ids below {rows}, the rows of the embeddings",
        where=f'"{name}"',
        remedy=PAIR,
    )


def differences(checkpoint: Checkpoint, against: Checkpoint) -> Iterator[PreflightFinding]:
    """Yield what differs from the running checkpoint and cannot be seen in weights; each needs somebody's approval."""
    for key in sorted(checkpoint.config.keys() | against.config.keys()):
        if key in NO_MEANING:
            continue
        new, old = checkpoint.config.get(key), against.config.get(key)
        if new != old:
            yield _difference(
                "C02" if key in SEEN_IN_WEIGHTS else "C05",
                f'"config.json", "{shortened(key)}"',
                new,
                old,
                Severity.RISK if key in SEEN_IN_WEIGHTS else Severity.SILENT,
            )
    new_defaults, old_defaults = _defaults(checkpoint.path), _defaults(against.path)
    for key in sorted(new_defaults.keys() | old_defaults.keys()):
        new, old = new_defaults.get(key), old_defaults.get(key)
        if key not in NO_MEANING and new != old:
            yield _difference("C11", f'"generation_config.json", "{shortened(key)}"', new, old, Severity.SILENT)
    for fault_id, name in (
        ("C09", "tokenizer.json"),
        ("C09", "tokenizer.model"),
        ("C10", "tokenizer_config.json"),
        ("C10", "chat_template.jinja"),
    ):
        new_hash, old_hash = _file_digest(checkpoint.path / name), _file_digest(against.path / name)
        if new_hash != old_hash:
            yield _difference(fault_id, f'"{name}"', new_hash, old_hash, Severity.SILENT)


def _difference(fault_id: str, where: str, new: object, old: object, severity: Severity) -> PreflightFinding:
    return PreflightFinding(
        id=fault_id,
        severity=severity,
        seen=shortened(new),
        expected=f"{shortened(old)}, as in the running checkpoint",
        where=where,
        remedy="approve the change, or publish the file that belongs to this release",
    )


def _defaults(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path / "generation_config.json")
    except (CheckpointDefect, ValueError):
        return {}


def _file_digest(path: Path) -> str:
    from harness.checkpoint.hashing import Part, hash_parts  # what pre-flight needs with --against alone

    if not path.is_file():
        return "absent"
    try:
        (digest,) = hash_parts([Part(path, 0, path.stat().st_size)])
    except (OSError, ValueError, CheckpointDefect) as error:
        return f"unreadable ({shortened(error)})"
    return f"blake3 {digest.hex()[:16]}"
