"""The name of every way a checkpoint can be structurally wrong, and what a file is when it is no weight file."""

from __future__ import annotations

from enum import StrEnum

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_JSON_BYTES = 100_000_000


class Defect(StrEnum):
    """The rule that a checkpoint breaks; the value is what reports print."""

    # one weight file
    ABSENT_FILE = "absent_file"
    DANGLING_LINK = "dangling_link"
    UNREADABLE_FILE = "unreadable_file"
    NOT_A_REGULAR_FILE = "not_a_regular_file"
    EMPTY_FILE = "empty_file"
    ZERO_FILE = "zero_file"
    POINTER_FILE = "pointer_file"
    HTML_FILE = "html_file"
    ZIP_FILE = "zip_file"
    HEADER_TOO_SMALL = "header_too_small"
    HEADER_TOO_LARGE = "header_too_large"
    HEADER_TRUNCATED = "header_truncated"
    HEADER_NOT_JSON = "header_not_json"
    METADATA_INVALID = "metadata_invalid"
    TENSOR_INFO_INVALID = "tensor_info_invalid"
    OFFSET_HOLE = "offset_hole"
    OFFSET_OVERLAP = "offset_overlap"
    OFFSET_REVERSED = "offset_reversed"
    SIZE_OVERFLOW = "size_overflow"
    SIZE_MISMATCH = "size_mismatch"
    DATA_SECTION_SHORT = "data_section_short"
    DATA_SECTION_LONG = "data_section_long"
    DUPLICATE_KEY = "duplicate_key"  # the library accepts it and the last one wins
    # the directory
    DIRECTORY_ABSENT = "directory_absent"
    DIRECTORY_UNREADABLE = "directory_unreadable"
    CONFIG_ABSENT = "config_absent"
    CONFIG_NOT_JSON = "config_not_json"
    NO_WEIGHTS = "no_weights"
    PICKLES_ONLY = "pickles_only"
    MISSING_SHARD_OF_SERIES = "missing_shard_of_series"
    MIXED_SERIES = "mixed_series"
    DUPLICATE_TENSOR = "duplicate_tensor"
    MIXED_WEIGHT_FAMILIES = "mixed_weight_families"
    NESTED_CHECKPOINT = "nested_checkpoint"
    PARTIAL_DOWNLOAD_FILE = "partial_download_file"
    # the weight index
    INDEX_NOT_JSON = "index_not_json"
    INDEX_ENTRY_INVALID = "index_entry_invalid"
    INDEX_NAMES_ABSENT_SHARD = "index_names_absent_shard"
    INDEX_NAMES_ABSENT_TENSOR = "index_names_absent_tensor"
    TENSOR_IN_OTHER_SHARD = "tensor_in_other_shard"
    TENSOR_NOT_IN_INDEX = "tensor_not_in_index"
    SHARD_NOT_IN_INDEX = "shard_not_in_index"


def foreign_content(first_bytes: bytes) -> tuple[Defect, str] | None:
    """Say what a refused weight file really is, from its first bytes; None when it looks like nothing known.

    Only asked about files that are no valid safetensors: a header of 60 bytes also begins with "<".
    """
    start = first_bytes.lstrip()[:32].lower()
    if first_bytes.startswith(b"version https://git-lfs"):
        return Defect.POINTER_FILE, "a git-lfs pointer of a few lines, not the weights it points to"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<error")):
        return Defect.HTML_FILE, "a web page (an error or login page saved under a weight file's name)"
    if first_bytes.startswith(b"PK\x03\x04"):
        return Defect.ZIP_FILE, "a zip archive (a PyTorch file saved under a safetensors name?)"
    if first_bytes and not first_bytes.strip(b"\0"):
        return Defect.ZERO_FILE, f"the first {len(first_bytes):,} bytes are all zero (preallocated, never written?)"
    return None
