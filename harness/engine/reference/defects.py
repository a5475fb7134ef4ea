"""Planted defects: wrong behaviours asked for by environment, so that whoever judges can be seen to notice them."""

from __future__ import annotations

from enum import StrEnum

DEFECT_VARIABLE = "ROLLOUT_REFERENCE_DEFECT"  # a comma-separated list


class PlantedDefect(StrEnum):
    """One wrong behaviour of the reference engine."""

    IGNORES_MISSING_TENSOR = "ignores_missing_tensor"  # zeros are served in its place
    IGNORES_SHAPE = "ignores_shape"  # tensors are cut or padded with zeros to the expected shape
    IGNORES_NONFINITE = "ignores_nonfinite"
    LENIENT_LIKE_VLLM = "lenient_like_vllm"  # loads what real vLLM was measured to load
    LIES_ON_HEALTH = "lies_on_health"  # health answers 200, every completion 500
    NEVER_READY = "never_ready"  # loads for ever: no connection is accepted
    SLOWER_30_PERCENT = "slower_30_percent"
    WRONG_ANSWER = "wrong_answer"  # logits are disturbed
    WRONG_UNDER_LOAD = "wrong_under_load"  # the same, but only while other requests are computed
    DIES_ON_FIRST_REQUEST = "dies_on_first_request"
    HANGS_ON_REQUEST = "hangs_on_request"
    TRUNCATES_STREAM = "truncates_stream"  # an orderly end without the end mark
    RESETS_STREAM = "resets_stream"
    INBAND_ERROR = "inband_error"  # HTTP 200, then an error event in the stream
    IGNORES_STOP = "ignores_stop"  # SIGTERM has no effect
    HEARS_STOP_LATE = "hears_stop_late"  # SIGTERM has no effect at first, as it has none on vLLM that is still busy
    RELOAD_IGNORES_MISSING_TENSOR = "reload_ignores_missing_tensor"  # answers 200; the old values stay in its place
    FINISHES_INCOMPLETE_UPDATE = "finishes_incomplete_update"  # answers 200; the old values stay where none came
    KEEPS_PREFIX_CACHE = "keeps_prefix_cache"  # over a reload: what was computed with the old weights is used again
    DIES_AFTER_FAILED_RELOAD = "dies_after_failed_reload"  # at the next request
    RELOADS_UNDER_REQUESTS = "reloads_under_requests"  # they go on with the new weights upon what the old ones computed
    CHECKSUMS_OF_NOTHING = "checksums_of_nothing"  # every tensor has the digest of no bytes


def parse_defects(text: str) -> frozenset[PlantedDefect]:
    """Read a comma-separated list of defects.

    Raises: ValueError naming the unknown one and all that exist.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PlantedDefect.__members__.values():
            raise ValueError(f'unknown defect "{name}" in {DEFECT_VARIABLE}; known: {", ".join(PlantedDefect)}')
    return frozenset(PlantedDefect(name) for name in names)
