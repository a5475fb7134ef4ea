"""What each structural defect of a checkpoint means for a rollout, and how to mend it."""

from __future__ import annotations

from harness.checkpoint.defect import Defect
from harness.errors import CheckpointDefect
from harness.guards.finding import PreflightFinding, Severity, shortened

COPY_AGAIN = "copy the file again from where it was published, then compare sizes and digests"
CLEAN_DIRECTORY = "publish into a new, empty directory, so that nothing of another release is left in it"

ONE_FORMAT = (
    "keep the format that is meant and remove the other: consolidated*.safetensors win over all, safetensors over .bin"
)
LOADED = (".safetensors", ".json", ".bin")  # an unfinished copy of one of these means that the set is not whole

REFUSES, SILENT, RISK = Severity.REFUSES, Severity.SILENT, Severity.RISK

# defect: (row of the fault taxonomy, severity, what was expected, how to mend it)
MEANING: dict[Defect, tuple[str, Severity, str, str]] = {
    Defect.ABSENT_FILE: ("D20", REFUSES, "a file", COPY_AGAIN),
    Defect.DANGLING_LINK: ("D20", REFUSES, "a link to a file that is there", "repair the link or copy the file itself"),
    Defect.UNREADABLE_FILE: ("D20", REFUSES, "a file that this user can read", "repair permissions or the file system"),
    Defect.NOT_A_REGULAR_FILE: ("D20", REFUSES, "a regular file", COPY_AGAIN),
    Defect.EMPTY_FILE: ("D02", REFUSES, "weights", COPY_AGAIN),
    Defect.ZERO_FILE: ("D02", REFUSES, "a safetensors header", COPY_AGAIN),
    Defect.POINTER_FILE: ("D02", REFUSES, "the weights themselves", "fetch the real objects (git lfs pull)"),
    Defect.HTML_FILE: ("D02", REFUSES, "a safetensors header", "download again with valid credentials"),
    Defect.ZIP_FILE: ("D02", REFUSES, "a safetensors header", "convert the file to safetensors"),
    Defect.HEADER_TOO_SMALL: ("D01", REFUSES, "at least 8 bytes", COPY_AGAIN),
    Defect.HEADER_TOO_LARGE: ("D02", REFUSES, "a safetensors header", COPY_AGAIN),
    Defect.HEADER_TRUNCATED: ("D01", REFUSES, "a whole header", COPY_AGAIN),
    Defect.HEADER_NOT_JSON: ("D01", REFUSES, "a JSON header", COPY_AGAIN),
    Defect.METADATA_INVALID: ("D01", REFUSES, "text metadata", "write the file again with the safetensors library"),
    Defect.TENSOR_INFO_INVALID: ("D01", REFUSES, "dtype, shape and offsets", "write the file again with the library"),
    Defect.OFFSET_HOLE: ("D01", REFUSES, "tensors without holes between them", COPY_AGAIN),
    Defect.OFFSET_OVERLAP: ("D01", REFUSES, "tensors that do not overlap", COPY_AGAIN),
    Defect.OFFSET_REVERSED: ("D01", REFUSES, "offsets in order", COPY_AGAIN),
    Defect.SIZE_OVERFLOW: ("D01", REFUSES, "a size that fits 64 bits", COPY_AGAIN),
    Defect.SIZE_MISMATCH: ("D16", REFUSES, "as many bytes as dtype and shape take", COPY_AGAIN),
    Defect.DATA_SECTION_SHORT: ("D01", REFUSES, "all bytes that the header describes", COPY_AGAIN),
    Defect.DATA_SECTION_LONG: ("D01", REFUSES, "no bytes beyond those the header describes", COPY_AGAIN),
    Defect.DUPLICATE_KEY: ("D11", SILENT, "each tensor once", "write the file again with the safetensors library"),
    Defect.DIRECTORY_ABSENT: ("D19", REFUSES, "a directory", "publish the checkpoint before starting the engine"),
    Defect.DIRECTORY_UNREADABLE: ("D20", REFUSES, "a directory that this user can read", "repair its permissions"),
    Defect.CONFIG_ABSENT: ("C12", REFUSES, "config.json", COPY_AGAIN),
    Defect.CONFIG_NOT_JSON: ("C12", REFUSES, "a JSON object", COPY_AGAIN),
    Defect.NO_WEIGHTS: ("D19", REFUSES, "*.safetensors", "publish the weights before starting the engine"),
    Defect.PICKLES_ONLY: ("D13", RISK, "*.safetensors, which can be checked", "convert the weights to safetensors"),
    Defect.MISSING_SHARD_OF_SERIES: ("D03", SILENT, "every shard of the series", COPY_AGAIN),
    Defect.MIXED_SERIES: ("D11", SILENT, "shards of one series", CLEAN_DIRECTORY),
    Defect.DUPLICATE_TENSOR: ("D11", SILENT, "each tensor in one file", CLEAN_DIRECTORY),
    Defect.MIXED_WEIGHT_FAMILIES: ("D14", SILENT, "weights of one format", ONE_FORMAT),
    Defect.NESTED_CHECKPOINT: ("D17", SILENT, "weights at the top level only", "swap a symlink instead of mv"),
    Defect.PARTIAL_DOWNLOAD_FILE: (
        "D19",
        SILENT,
        "a finished copy",
        "wait for the copy to end, or remove what it left",
    ),
    Defect.INDEX_NOT_JSON: ("C12", REFUSES, "a JSON object", COPY_AGAIN),
    Defect.INDEX_ENTRY_INVALID: ("C12", REFUSES, "a map from tensor to file name", COPY_AGAIN),
    Defect.INDEX_NAMES_ABSENT_SHARD: ("D03", REFUSES, "every file that the weight index names", COPY_AGAIN),
    Defect.INDEX_NAMES_ABSENT_TENSOR: ("D12", SILENT, "every tensor that the weight index names", CLEAN_DIRECTORY),
    Defect.TENSOR_IN_OTHER_SHARD: ("D12", RISK, "the tensor in the shard that the index names", CLEAN_DIRECTORY),
    Defect.TENSOR_NOT_IN_INDEX: ("D12", RISK, "every tensor in the weight index", CLEAN_DIRECTORY),
    Defect.SHARD_NOT_IN_INDEX: ("D12", SILENT, "a weight index that names every shard", CLEAN_DIRECTORY),
}


def finding_of(defect: CheckpointDefect) -> PreflightFinding:
    """Return the finding that a structural defect is."""
    fault_id, severity, expected, remedy = MEANING[Defect(defect.reason)]
    if defect.reason == Defect.MIXED_WEIGHT_FAMILIES and not defect.path.name.endswith(".safetensors"):
        fault_id = "D13"
    if defect.reason == Defect.PARTIAL_DOWNLOAD_FILE and not any(kind in defect.path.name for kind in LOADED):
        severity = RISK
    where = f'"{defect.path.name}"'
    if defect.tensor is not None:
        where += f', tensor "{shortened(defect.tensor)}"'
    if defect.offset_bytes is not None:
        where += f", byte {defect.offset_bytes:,}"
    return PreflightFinding(
        id=fault_id,
        severity=severity,
        seen=f"{defect.reason}: {shortened(defect.detail)}",
        expected=expected,
        where=where,
        remedy=remedy,
    )
