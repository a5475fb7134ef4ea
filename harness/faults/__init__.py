"""Everything that can be injected; a scenario writes `faults.widen_tensor(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.faults.cache import late_purge, stale_weight_cache
from harness.faults.config import mismatched_config
from harness.faults.dtypes import beyond_fp16_range, cast_all, cast_tensor, flip_dtype_in_header
from harness.faults.fault import Acting, CacheFault, Damage, Fault, Injected, LaunchFault, PublishFault, StartRace
from harness.faults.files import missing_shard, pointer_file, truncate_shard, zero_tail
from harness.faults.launch import launch_argument, launch_dtype, launch_environment
from harness.faults.mixtures import new_config_old_weights, old_config_new_weights, stale_index
from harness.faults.publish import nested_move, overwrite_in_place, rsync_in_place, slow_sync
from harness.faults.tensors import (
    drop_tensor,
    narrow_tensor,
    relayout_tensor,
    transpose_tensor,
    widen_tensor,
    wider_weights,
)

FAULTS: dict[str, Callable[..., Fault]] = {
    "beyond_fp16_range": beyond_fp16_range,
    "cast_all": cast_all,
    "cast_tensor": cast_tensor,
    "drop_tensor": drop_tensor,
    "flip_dtype_in_header": flip_dtype_in_header,
    "late_purge": late_purge,
    "launch_argument": launch_argument,
    "launch_dtype": launch_dtype,
    "launch_environment": launch_environment,
    "mismatched_config": mismatched_config,
    "missing_shard": missing_shard,
    "narrow_tensor": narrow_tensor,
    "nested_move": nested_move,
    "new_config_old_weights": new_config_old_weights,
    "old_config_new_weights": old_config_new_weights,
    "overwrite_in_place": overwrite_in_place,
    "pointer_file": pointer_file,
    "relayout_tensor": relayout_tensor,
    "rsync_in_place": rsync_in_place,
    "slow_sync": slow_sync,
    "stale_index": stale_index,
    "stale_weight_cache": stale_weight_cache,
    "transpose_tensor": transpose_tensor,
    "truncate_shard": truncate_shard,
    "widen_tensor": widen_tensor,
    "wider_weights": wider_weights,
    "zero_tail": zero_tail,
}

__all__ = [
    "FAULTS",
    "Acting",
    "CacheFault",
    "Damage",
    "Fault",
    "Injected",
    "LaunchFault",
    "PublishFault",
    "StartRace",
    "beyond_fp16_range",
    "cast_all",
    "cast_tensor",
    "drop_tensor",
    "flip_dtype_in_header",
    "late_purge",
    "launch_argument",
    "launch_dtype",
    "launch_environment",
    "mismatched_config",
    "missing_shard",
    "narrow_tensor",
    "nested_move",
    "new_config_old_weights",
    "old_config_new_weights",
    "overwrite_in_place",
    "pointer_file",
    "relayout_tensor",
    "rsync_in_place",
    "slow_sync",
    "stale_index",
    "stale_weight_cache",
    "transpose_tensor",
    "truncate_shard",
    "widen_tensor",
    "wider_weights",
    "zero_tail",
]

if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> None:
        raise AttributeError(f'fault "{name}" is unknown; faults: {", ".join(sorted(FAULTS))}')
