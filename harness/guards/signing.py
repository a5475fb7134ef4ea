"""Sign manifests and verify their signatures with OpenSSF model-signing: by keys, offline.

What is signed is the manifest, which names every byte of the checkpoint: 140 GB are hashed once, and by us. The signature is
that tool's own format, so `model_signing verify key MANIFEST --signature FILE --public_key KEY` agrees.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.errors import EXIT_BROKEN, EnvironmentMissing, HarnessError, UsageError

KEY_HINT = "expected a PEM file with a key on the curve P-256, P-384 or P-521"


class SignatureInvalid(HarnessError):
    """A signature is not the key owner's signature of this content."""

    exit_code = EXIT_BROKEN


def sign_manifest(manifest: Path, private_key: Path, signature: Path) -> None:
    """Write the signature of a manifest; the private key is unencrypted PEM.

    Raises: EnvironmentMissing without the extra; UsageError when the key or a path cannot be used.
    """
    with _library():
        from model_signing import signing

        try:
            configuration = signing.Config()  # type: ignore[no-untyped-call]
            signer = configuration.use_elliptic_key_signer(private_key=private_key)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f'the private key "{private_key}" cannot be used: {_short(error)}; {KEY_HINT}') from None
        try:
            signer.sign(manifest, signature)
        except (OSError, ValueError) as error:
            raise UsageError(f'"{manifest}" cannot be signed: {_short(error)}') from None


def verify_signature(content: bytes, signature: Path, public_key: Path) -> None:
    """Make sure that the owner of a key signed exactly these bytes of a manifest.

    Raises: EnvironmentMissing without the extra; UsageError when the key or the signature cannot be read;
    SignatureInvalid naming what does not fit.
    """
    if not signature.is_file():
        raise UsageError(f'the signature "{signature}" is not there')
    with _library():
        from cryptography.exceptions import InvalidSignature
        from model_signing import verifying

        try:
            configuration = verifying.Config()  # type: ignore[no-untyped-call]
            verifier = configuration.use_elliptic_key_verifier(public_key=public_key)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f'the public key "{public_key}" cannot be used: {_short(error)}; {KEY_HINT}') from None
        # The library verifies files, and what was verified has to be what is used: so it gets a copy of our own.
        with TemporaryDirectory(prefix="harness-manifest-") as directory:
            copy = Path(directory) / "manifest.json"
            copy.write_bytes(content)
            try:
                verifier.verify(copy, signature)
            except InvalidSignature:
                what = "it was changed after it was signed"
            except ValueError as error:
                what = _meaning(str(error))
            except Exception as error:  # whatever a damaged signature makes the library stumble over
                what = f"it is no signature that model-signing reads ({type(error).__name__})"
            else:
                return
    raise SignatureInvalid(f'the signature "{signature.name}" is not valid: {what}')


def _meaning(message: str) -> str:
    if message.startswith("Key mismatch"):
        return "another key signed it"
    if message.startswith("Signature mismatch"):
        return "the manifest is not the one that was signed"
    return f"it is no signature that model-signing reads ({message[:120]})"


@contextmanager
def _library() -> Iterator[None]:
    """Say how to get the library when it is absent, and keep its warnings out of our output."""
    try:
        import model_signing  # noqa: F401
    except ImportError as error:
        reason = f'the package "{error.name}" is not installed: install the extra "signing"'
        raise EnvironmentMissing("signing", reason) from None
    with redirect_stdout(sys.stderr):
        yield


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
