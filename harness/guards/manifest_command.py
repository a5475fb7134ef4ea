"""`harness manifest`: write down what a checkpoint holds when it is published, and sign that."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import EXIT_HELD, HarnessError
from harness.guards.command import CommandParser, print_json
from harness.guards.finding import printable
from harness.guards.manifest import signature_of, write_manifest


def manifest_main(argv: Sequence[str] | None = None) -> int:
    """Run `harness manifest`; return 0 when the manifest is written, 1 when the checkpoint cannot be read, 3 for a wrong call."""
    parser = CommandParser(
        prog="harness manifest",
        description="Write size and digest of every file and tensor of a checkpoint, to verify copies with it.",
        epilog="Verify with: harness preflight CHECKPOINT --manifest FILE [--public-key KEY]",
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the manifest to write")
    parser.add_argument(
        "--private-key", type=Path, metavar="KEY", help='sign it with this PEM key (extra "signing"), offline'
    )
    parser.add_argument("--signature", type=Path, metavar="FILE", help="the signature to write (default: FILE.sig)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    signature: Path | None = None
    try:
        manifest = write_manifest(options.checkpoint, options.out)
        if options.private_key is not None:
            from harness.guards.signing import sign_manifest

            signature = options.signature or signature_of(options.out)
            sign_manifest(options.out, options.private_key, signature)
    except HarnessError as error:
        print(f"harness manifest: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    tensors = sum(len(record.tensors) for record in manifest.files.values())
    size_bytes = sum(record.size_bytes for record in manifest.files.values())
    if options.json:
        print_json(
            {
                "manifest": str(options.out),
                "signature": None if signature is None else str(signature),
                "files": len(manifest.files),
                "tensors": tensors,
                "size_bytes": size_bytes,
            }
        )
    else:
        signed = "not signed" if signature is None else f'signed in "{signature}"'
        print(
            printable(
                f'"{options.out}": {len(manifest.files)} files, {tensors:,} tensors, {size_bytes:,} bytes; {signed}'
            )
        )
    return EXIT_HELD
