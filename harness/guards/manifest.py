"""Write down at publish time what a checkpoint holds, byte for byte, and find later what is not as it was published.

A manifest is a JSON document: size and BLAKE3 of every file (as `b3sum` prints it), and dtype, shape and BLAKE3 of every
tensor. Files are named relative to the checkpoint; names in a manifest are compared, never opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.checkpoint.defect import MAX_JSON_BYTES
from harness.checkpoint.hashing import Part, hash_each, hash_parts
from harness.checkpoint.shard import Shard, open_regular, read_shard
from harness.errors import CheckpointDefect, HarnessError, UsageError
from harness.guards.finding import PreflightFinding
from harness.guards.manifest_document import FileRecord, Manifest, TensorRecord, parse_manifest, save_manifest
from harness.guards.unlike_published import absent, changed, surplus, unreadable, unusable
from harness.guards.versions import MANIFEST, READY

__all__ = ["FileRecord", "Manifest", "TensorRecord", "manifest_findings", "signature_of", "write_manifest"]

SIGNATURE_SUFFIX = ".sig"
WEIGHT_SUFFIX = ".safetensors"


def write_manifest(checkpoint: Path, file: Path) -> Manifest:
    """Read a whole checkpoint and write its manifest to `file`, durably; what lies there is replaced in one step.

    A manifest inside the checkpoint does not list itself, its signature, or the publisher's ready marker.
    Raises: UsageError when `checkpoint` is no directory; CheckpointDefect when a file cannot be read; OSError.
    """
    if not checkpoint.is_dir():
        raise UsageError(f'the checkpoint "{checkpoint}" is not a directory')
    if file.is_dir() or not file.name:
        raise UsageError(f'the manifest is to be a file, but "{file}" is a directory')
    paths = _listed(checkpoint, file)
    sizes = {name: _size_bytes(path) for name, path in paths.items()}
    shards = {name: shard for name, path in paths.items() if (shard := _shard(path)) is not None}
    parts = [Part(path, 0, sizes[name]) for name, path in paths.items()]
    parts += [part for name, shard in shards.items() for part in _tensor_parts(paths[name], shard)]
    digests = iter([digest.hex() for digest in hash_parts(parts)])
    whole = dict(zip(paths, digests, strict=False))  # the files come first, their tensors follow
    files = {
        name: FileRecord(
            size_bytes=sizes[name],
            digest=whole[name],
            tensors={
                tensor.name: TensorRecord(dtype=tensor.dtype, shape=tensor.shape, digest=next(digests))
                for tensor in (shards[name].tensors if name in shards else ())
            },
        )
        for name in paths
    }
    manifest = Manifest(files=files)
    save_manifest(manifest, file)
    return manifest


def read_manifest(file: Path) -> bytes:
    """Return the bytes of a manifest file.

    Raises: UsageError when it cannot be read.
    """
    try:
        with os.fdopen(open_regular(file), "rb") as opened:
            return opened.read(MAX_JSON_BYTES + 1)
    except CheckpointDefect as defect:
        raise UsageError(f'the manifest "{file}" cannot be read: {defect.detail}') from None
    except OSError as error:
        raise UsageError(f'the manifest "{file}" cannot be read: {error.strerror or error}') from None


def manifest_findings(
    checkpoint: Path, manifest: Path, *, public_key: Path | None = None, signature: Path | None = None
) -> Iterator[PreflightFinding]:
    """Read a whole checkpoint and yield what is not as it was published: absent, surplus and different files.

    Of a different weight file the first different tensor is named. With `public_key` the manifest must be signed by its
    owner (`signature`, by default beside the manifest), else that is the one finding.
    Raises: UsageError when the manifest, the key or the signature cannot be read; EnvironmentMissing without the extra.
    """
    raw = read_manifest(manifest)
    if public_key is not None:
        from harness.guards.signing import verify_signature

        try:
            verify_signature(raw, signature or signature_of(manifest), public_key)
        except UsageError:
            raise
        except HarnessError as error:
            yield unusable(manifest.name, str(error), "a manifest signed by the owner of the key")
            return
    try:
        published = parse_manifest(raw)
    except ValueError as error:
        yield unusable(manifest.name, str(error)[:200], "the manifest that was written at publish time")
        return
    paths = _listed(checkpoint, manifest)
    for name in sorted(published.files.keys() - paths.keys()):
        yield absent(name)
    for name in sorted(paths.keys() - published.files.keys()):
        yield surplus(name)
    yield from _differences({name: path for name, path in paths.items() if name in published.files}, published)


def signature_of(manifest: Path) -> Path:
    """Return where the signature of a manifest lies when nothing else is said."""
    return manifest.with_name(manifest.name + SIGNATURE_SUFFIX)


def _differences(paths: Mapping[str, Path], published: Manifest) -> Iterator[PreflightFinding]:
    """Hash what has its old size, all of it on all cores; tensors are hashed only where a file differs."""
    to_hash: dict[str, Part] = {}
    for name, path in paths.items():
        try:
            size = _size_bytes(path)
        except CheckpointDefect as defect:
            yield unreadable(name, defect)
            continue
        if size == published.files[name].size_bytes:
            to_hash[name] = Part(path, 0, size)
        else:
            yield _difference(name, path, published.files[name], size)
    for (name, part), digest in zip(to_hash.items(), hash_each(list(to_hash.values())), strict=True):
        if isinstance(digest, CheckpointDefect):
            yield unreadable(name, digest)
        elif digest.hex() != published.files[name].digest:
            yield _difference(name, part.path, published.files[name], part.size_bytes)


def _difference(name: str, path: Path, record: FileRecord, size: int) -> PreflightFinding:
    """Say how a file differs: the first tensor whose dtype, shape or bytes are others."""
    sizes = "" if size == record.size_bytes else f"; {size:,} bytes, published were {record.size_bytes:,}"
    if not record.tensors:
        return changed(name, f"other bytes than were published{sizes}")
    try:
        shard = read_shard(path)
    except CheckpointDefect as defect:
        return changed(name, f"no longer a whole safetensors file: {defect.reason}{sizes}")
    ways = _tensor_differences(path, shard, record)
    if not ways:
        return changed(name, f"another header round the same tensors{sizes}", is_harmless=True)
    tensor, byte, how = ways[0]
    others = f"; {len(ways) - 1} more {'tensor differs' if len(ways) == 2 else 'tensors differ'}" if ways[1:] else ""
    return changed(name, f"{how}{others}{sizes}", tensor=tensor, byte=byte)


def _tensor_differences(path: Path, shard: Shard, record: FileRecord) -> list[tuple[str, int | None, str]]:
    """Return name, byte in the file and how it differs of every tensor that is not as published, in file order."""
    ways: list[tuple[str, int | None, str]] = []
    for tensor, digest in zip(shard.tensors, hash_each(_tensor_parts(path, shard)), strict=True):
        before = record.tensors.get(tensor.name)
        if before is None:
            how = "was not published"
        elif (tensor.dtype, tensor.shape) != (before.dtype, before.shape):
            how = f"{tensor.dtype} {list(tensor.shape)}, published was {before.dtype} {list(before.shape)}"
        elif isinstance(digest, CheckpointDefect) or digest.hex() != before.digest:
            how = "other bytes than were published"
        else:
            continue
        ways.append((tensor.name, shard.data_start_byte + tensor.begin_byte, how))
    there = {tensor.name for tensor in shard.tensors}
    return ways + [(name, None, "is absent") for name in record.tensors if name not in there]


def _listed(checkpoint: Path, manifest: Path) -> dict[str, Path]:
    """Return every file below a checkpoint by its relative path; links to files count as files."""
    own = {os.path.abspath(path) for path in (manifest, signature_of(manifest))}
    own |= {os.path.abspath(checkpoint / name) for name in (READY, MANIFEST, MANIFEST + SIGNATURE_SUFFIX)}
    found = {}
    for parent, directories, names in os.walk(checkpoint):
        directories.sort()
        for name in sorted(names):
            path = Path(parent) / name
            if os.path.abspath(path) not in own:
                found[path.relative_to(checkpoint).as_posix()] = path
    return found


def _shard(path: Path) -> Shard | None:
    if not path.name.endswith(WEIGHT_SUFFIX):
        return None
    try:
        return read_shard(path)
    except CheckpointDefect:
        return None


def _tensor_parts(path: Path, shard: Shard) -> list[Part]:
    start = shard.data_start_byte
    return [Part(path, start + one.begin_byte, start + one.end_byte, one.name) for one in shard.tensors]


def _size_bytes(path: Path) -> int:
    """Return the size of a regular file.

    Raises: CheckpointDefect when it is none, or cannot be read.
    """
    descriptor = open_regular(path)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
