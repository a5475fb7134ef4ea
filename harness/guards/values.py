"""Scan tensor bytes for values that no header shows: not finite, beyond fp16, all zero, a zero tail.

NumPy is not allowed here, so whole blocks go through `bytes.translate` and integer bit operations, which run in C.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.header import Tensor
from harness.checkpoint.shard import Shard, open_regular
from harness.checkpoint.survey import Checkpoint
from harness.errors import CheckpointDefect
from harness.guards.finding import PreflightFinding, Severity

BLOCK_BYTES = 1024 * 1024
SUSPICIOUS_TAIL_BYTES = 256
ZEROS = bytes(BLOCK_BYTES)
RESTORE = "copy the file again from where it was published, then compare digests"

ABOVE_47 = bytes((value & 0x7F) > 0x47 for value in range(256))  # bf16 or f32 of 2^17 and more, infinities, NaN
IS_47 = bytes((value & 0x7F) == 0x47 for value in range(256))
HUGE = bytes((value & 0x7F) >= 0x60 for value in range(256))  # bf16 or f32 of 2^65 and more, infinities, NaN
IS_7F = bytes((value & 0x7F) == 0x7F for value in range(256))
IS_7C = bytes((value & 0x7C) == 0x7C for value in range(256))  # exponent of a half-precision infinity or NaN
TOP_BIT = bytes(value >= 0x80 for value in range(256))
BENIGN_WIDE = bytes(value for value in range(256) if (value & 0x7F) < 0x47)
BENIGN_HALF = bytes(value for value in range(256) if (value & 0x7C) != 0x7C)
BENIGN_E4M3 = bytes(value for value in range(256) if (value & 0x7F) != 0x7F)
VALUE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1}
# dtypes whose last byte alone tells: bytes of finite values, and what finds the others; none of them exceeds fp16
LAST_BYTE_TELLS = {"F16": (BENIGN_HALF, IS_7C), "F8_E5M2": (BENIGN_HALF, IS_7C), "F8_E4M3": (BENIGN_E4M3, IS_7F)}


@dataclass(slots=True)
class _Seen:
    not_finite: int = 0
    beyond_fp16: int = 0  # finite, and 65536 or more
    huge: int = 0  # of those, 2^65 or more: the highest bit of an exponent flipped
    is_zero: bool = True


def value_findings(checkpoint: Checkpoint, *, to_fp16: bool) -> Iterator[PreflightFinding]:
    """Yield what is wrong with the values of every shard; `to_fp16` when the engine will serve in float16.

    Reads every tensor byte. Values from 65520 to 65535, which also round to infinity in fp16, are not counted.
    """
    for shard in checkpoint.shards:
        try:
            yield from _shard_findings(checkpoint.path / shard.name, shard, to_fp16=to_fp16)
        except (OSError, CheckpointDefect) as error:
            yield PreflightFinding(
                id="D20",
                severity=Severity.REFUSES,
                seen=str(error),
                expected="a file that can be read to its end",
                where=f'"{shard.name}"',
                remedy="repair permissions or the file system",
            )


def _shard_findings(path: Path, shard: Shard, *, to_fp16: bool) -> Iterator[PreflightFinding]:
    descriptor = open_regular(path)
    try:
        zero_bytes = _zero_tail_bytes(descriptor, shard)
        if zero_bytes < SUSPICIOUS_TAIL_BYTES:
            zero_bytes = 0
        tail_byte = shard.size_bytes - shard.data_start_byte - zero_bytes
        for tensor in shard.tensors:
            if tensor.begin_byte >= tail_byte and zero_bytes:
                break  # the finding about the tail says it
            seen = _scan(descriptor, shard, tensor)
            yield from _tensor_findings(tensor, seen, to_fp16=to_fp16)
        if zero_bytes:
            yield _tail_finding(shard, zero_bytes)
    finally:
        os.close(descriptor)


def _scan(descriptor: int, shard: Shard, tensor: Tensor) -> _Seen:
    seen = _Seen()
    width = VALUE_BYTES.get(tensor.dtype)
    position, end = shard.data_start_byte + tensor.begin_byte, shard.data_start_byte + tensor.end_byte
    while position < end:
        block = os.pread(descriptor, min(BLOCK_BYTES, end - position), position)
        if not block:
            raise OSError(f'the file became shorter while tensor "{tensor.name}" was read')
        if width is not None:
            block = block[: len(block) - len(block) % width] or block
        position += len(block)
        if block == (ZEROS if len(block) == BLOCK_BYTES else ZEROS[: len(block)]):
            continue
        seen.is_zero = False
        if width is not None:
            _count(block, width, tensor.dtype, seen)
    return seen


def _count(block: bytes, width: int, dtype: str, seen: _Seen) -> None:
    high = block[width - 1 :: width]
    if dtype in LAST_BYTE_TELLS:
        benign, not_finite_table = LAST_BYTE_TELLS[dtype]
        if high.translate(None, benign):
            seen.not_finite += _bits(high, not_finite_table).bit_count()
        return
    if not high.translate(None, BENIGN_WIDE):
        return
    top_bit = _bits(block[width - 2 :: width], TOP_BIT)
    not_finite = _bits(high, IS_7F) & top_bit
    large = _bits(high, ABOVE_47) | (_bits(high, IS_47) & top_bit)
    seen.not_finite += not_finite.bit_count()
    seen.beyond_fp16 += (large & ~not_finite).bit_count()
    seen.huge += (_bits(high, HUGE) & ~not_finite).bit_count()


def _bits(data: bytes, table: bytes) -> int:
    """Return one number with a one in the byte of each position for which `table` says yes."""
    return int.from_bytes(data.translate(table), "little")


def _tensor_findings(tensor: Tensor, seen: _Seen, *, to_fp16: bool) -> Iterator[PreflightFinding]:
    where = f'"{tensor.shard}", tensor "{tensor.name}"'
    if seen.not_finite:
        yield PreflightFinding(
            id="D15",
            severity=Severity.SILENT,
            seen=f"{seen.not_finite:,} values that are infinite or not a number",
            expected="finite values",
            where=where,
            remedy=RESTORE,
        )
    if seen.huge:
        yield PreflightFinding(
            id="D15",
            severity=Severity.SILENT,
            seen=f"{seen.huge:,} values of 2^65 or more",
            expected="values of a trained model",
            where=where,
            remedy=RESTORE,
        )
    if seen.beyond_fp16 > seen.huge:
        yield PreflightFinding(
            id="C07",
            severity=Severity.SILENT if to_fp16 else Severity.RISK,
            seen=f"{seen.beyond_fp16 - seen.huge:,} values of 65536 or more, infinite in float16",
            expected="values within +-65504" if to_fp16 else "values of a trained model",
            where=where,
            remedy="serve in bfloat16" if to_fp16 else "check where the values come from",
        )
    if seen.is_zero and tensor.size_bytes:
        matrix = len(tensor.shape) > 1
        yield PreflightFinding(
            id="D15",
            severity=Severity.SILENT if matrix else Severity.RISK,
            seen="all values are zero",
            expected="values of a trained model",
            where=where,
            remedy=RESTORE,
        )


def _tail_finding(shard: Shard, zero_bytes: int) -> PreflightFinding:
    """Return the finding of a file whose end was never written; unused rows of an embedding may be zero: a risk."""
    begin = shard.size_bytes - zero_bytes - shard.data_start_byte
    touched = [tensor for tensor in shard.tensors if tensor.end_byte > begin and tensor.size_bytes]
    last = touched[0]
    is_vector, is_rows = len(last.shape) < 2, "embed" in last.name or "lm_head" in last.name
    harmless = len(touched) == 1 and (is_vector or (is_rows and last.begin_byte < begin))
    return PreflightFinding(
        id="D15",
        severity=Severity.RISK if harmless else Severity.SILENT,
        seen=f"the last {zero_bytes:,} bytes are zero, in {len(touched)} tensors",
        expected="values to the end of the file",
        where=f'"{shard.name}", byte {shard.size_bytes - zero_bytes:,}',
        remedy=RESTORE,
    )


def _zero_tail_bytes(descriptor: int, shard: Shard) -> int:
    end = shard.size_bytes
    while end > shard.data_start_byte:
        size = min(BLOCK_BYTES, end - shard.data_start_byte)
        block = os.pread(descriptor, size, end - size)
        rest = block.rstrip(b"\0")
        end -= len(block) - len(rest)
        if rest or len(block) < size:
            break
    return shard.size_bytes - end
