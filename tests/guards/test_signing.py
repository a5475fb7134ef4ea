"""A manifest signed with a key is believed; another key, another content and a damaged signature are named."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.checkpoint import models
from harness.checkpoint.copy import private_copy
from harness.errors import EXIT_HELD, EXIT_USAGE, EnvironmentMissing, UsageError
from harness.guards.manifest import manifest_findings, signature_of, write_manifest
from harness.guards.signing import SignatureInvalid, sign_manifest, verify_signature

pytest.importorskip("model_signing", reason='the extra "signing" is not installed')

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519


def make_keys(directory: Path, name: str) -> tuple[Path, Path]:
    private, public = directory / f"{name}.key", directory / f"{name}.pub"
    key = ec.generate_private_key(ec.SECP256R1())
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path, "owner")


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    source = models.tiny_llama(hidden=32, intermediate=32, layers=1).build(tmp_path_factory.mktemp("cache"))
    return private_copy(source, tmp_path / "checkpoint")


@pytest.fixture
def manifest(path: Path, keys: tuple[Path, Path], tmp_path: Path) -> Path:
    """A signed manifest."""
    file = tmp_path / "manifest.json"
    write_manifest(path, file)
    sign_manifest(file, keys[0], signature_of(file))
    return file


def test_what_was_signed_is_believed(path: Path, manifest: Path, keys: tuple[Path, Path]) -> None:
    assert list(manifest_findings(path, manifest, public_key=keys[1])) == []
    verify_signature(manifest.read_bytes(), signature_of(manifest), keys[1])


def test_a_changed_checkpoint_is_found_behind_a_valid_signature(
    path: Path, manifest: Path, keys: tuple[Path, Path]
) -> None:
    (path / "config.json").write_text("{}")
    (finding,) = manifest_findings(path, manifest, public_key=keys[1])
    assert finding.where == '"config.json"'


def test_a_manifest_that_was_changed_with_the_checkpoint_is_not_believed(
    path: Path, manifest: Path, keys: tuple[Path, Path]
) -> None:
    (path / "config.json").write_text("{}")
    write_manifest(path, manifest)
    assert list(manifest_findings(path, manifest)) == []
    (finding,) = manifest_findings(path, manifest, public_key=keys[1])
    assert finding.blocks
    assert "the manifest is not the one that was signed" in finding.seen


def test_another_key(path: Path, manifest: Path, tmp_path: Path) -> None:
    _, stranger = make_keys(tmp_path, "stranger")
    (finding,) = manifest_findings(path, manifest, public_key=stranger)
    assert finding.blocks
    assert "another key signed it" in finding.seen


def test_a_signature_changed_after_signing(manifest: Path, keys: tuple[Path, Path]) -> None:
    signature = signature_of(manifest)
    document = json.loads(signature.read_text())
    payload = base64.b64decode(document["dsseEnvelope"]["payload"])
    document["dsseEnvelope"]["payload"] = base64.b64encode(payload.replace(b"manifest.json", b"another1.json")).decode()
    signature.write_text(json.dumps(document))
    with pytest.raises(SignatureInvalid, match="changed after it was signed"):
        verify_signature(manifest.read_bytes(), signature, keys[1])


@pytest.mark.parametrize("content", ["", "{}", "[", "[]", '{"verificationMaterial": 3}', "\0"])
def test_a_damaged_signature(manifest: Path, keys: tuple[Path, Path], content: str) -> None:
    signature_of(manifest).write_text(content)
    with pytest.raises(SignatureInvalid, match="no signature that model-signing reads"):
        verify_signature(manifest.read_bytes(), signature_of(manifest), keys[1])


def test_files_that_are_no_keys(path: Path, manifest: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "ed25519.key"
    other.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    for unusable in (tmp_path / "none", manifest, other, keys[1], tmp_path):
        with pytest.raises(UsageError, match="private key"):
            sign_manifest(manifest, unusable, signature_of(manifest))
    for unusable in (tmp_path / "none", manifest, other, keys[0], tmp_path):
        with pytest.raises(UsageError, match="public key"):
            list(manifest_findings(path, manifest, public_key=unusable))
    signature_of(manifest).unlink()
    with pytest.raises(UsageError, match="is not there"):
        list(manifest_findings(path, manifest, public_key=keys[1]))


def test_without_the_extra_it_is_said_what_to_install(
    manifest: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(EnvironmentMissing, match='install the extra "signing"'):
        sign_manifest(manifest, keys[0], signature_of(manifest))


def test_command(path: Path, keys: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.json"
    assert cli.main(["manifest", str(path), "--out", str(out), "--private-key", str(keys[0])]) == EXIT_HELD
    assert 'signed in "' in capsys.readouterr().out
    assert list(manifest_findings(path, out, public_key=keys[1])) == []
    assert cli.main(["manifest", str(path), "--out", str(out), "--private-key", str(keys[1])]) == EXIT_USAGE
    assert "cannot be used" in capsys.readouterr().err
