"""Everything that can be injected; a scenario writes `faults.widen_tensor(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.faults.broken_files import damage_header, extend_shard, foreign_file, previous_shard, unreadable_file
from harness.faults.cache import late_purge, stale_weight_cache
from harness.faults.compile_cache import damaged_compile_cache, moved_compile_cache, unwritable_compile_cache
from harness.faults.compiler import missing_compiler
from harness.faults.config import added_config, mismatched_config, removed_config
from harness.faults.device_memory import held_device_memory
from harness.faults.disk import full_disk
from harness.faults.draft import mismatched_draft
from harness.faults.dtypes import beyond_fp16_range, cast_all, cast_tensor, flip_dtype_in_header
from harness.faults.fault import (
    Acting,
    AdapterFault,
    CacheFault,
    CompileCacheFault,
    Damage,
    Fault,
    Injected,
    LaunchFault,
    LiveFault,
    PublishFault,
    StartRace,
)
from harness.faults.files import missing_shard, pointer_file, truncate_shard, zero_tail
from harness.faults.frozen import frozen_process
from harness.faults.hub_cache import broken_hub_cache
from harness.faults.kernel_cache import foreign_kernels
from harness.faults.killed import killed_process, killed_with_leftovers
from harness.faults.latency import cold_compile_cache, cold_prefix_cache, compile_in_traffic
from harness.faults.launch import (
    anonymous_weights,
    context_length,
    held_port,
    launch_argument,
    launch_dtype,
    launch_environment,
    parallel_size,
)
from harness.faults.leftovers import (
    leftover_consolidated,
    leftover_shards,
    nested_checkpoint,
    new_weights_as_bin,
    stale_numpy_cache,
)
from harness.faults.loading import changed_while_loading
from harness.faults.lora import adapter_prefix, adapter_rank, adapter_width
from harness.faults.memory import memory_limit
from harness.faults.mixtures import new_config_old_weights, old_config_new_weights, stale_index
from harness.faults.names import add_bias, rename_prefix, rename_tensor
from harness.faults.old_server import port_of_old_server
from harness.faults.presharded import presharded_state
from harness.faults.publish import nested_move, overwrite_in_place, rsync_in_place, slow_sync
from harness.faults.shared_memory import full_shared_memory, small_shared_memory
from harness.faults.side_files import (
    changed_chat_template,
    cut_json,
    generation_defaults,
    missing_chat_template,
    missing_file,
    permuted_tokenizer,
    token_beyond_rows,
)
from harness.faults.sleep import updated_while_asleep, woken_without_reload
from harness.faults.slow_storage import slow_storage
from harness.faults.socket_path import forbidden_socket
from harness.faults.tensor_values import flip_bit, nonfinite_values, swap_tensors
from harness.faults.tensors import (
    drop_tensor,
    narrow_tensor,
    relayout_tensor,
    transpose_tensor,
    widen_tensor,
    wider_weights,
)
from harness.faults.weight_daemon import stale_weight_daemon

FAULTS: dict[str, Callable[..., Fault]] = {
    "adapter_prefix": adapter_prefix,
    "adapter_rank": adapter_rank,
    "adapter_width": adapter_width,
    "add_bias": add_bias,
    "added_config": added_config,
    "anonymous_weights": anonymous_weights,
    "beyond_fp16_range": beyond_fp16_range,
    "broken_hub_cache": broken_hub_cache,
    "cast_all": cast_all,
    "cast_tensor": cast_tensor,
    "changed_chat_template": changed_chat_template,
    "changed_while_loading": changed_while_loading,
    "cold_compile_cache": cold_compile_cache,
    "cold_prefix_cache": cold_prefix_cache,
    "compile_in_traffic": compile_in_traffic,
    "context_length": context_length,
    "cut_json": cut_json,
    "damaged_compile_cache": damaged_compile_cache,
    "damage_header": damage_header,
    "drop_tensor": drop_tensor,
    "extend_shard": extend_shard,
    "flip_bit": flip_bit,
    "flip_dtype_in_header": flip_dtype_in_header,
    "forbidden_socket": forbidden_socket,
    "foreign_file": foreign_file,
    "foreign_kernels": foreign_kernels,
    "frozen_process": frozen_process,
    "full_disk": full_disk,
    "full_shared_memory": full_shared_memory,
    "generation_defaults": generation_defaults,
    "held_device_memory": held_device_memory,
    "held_port": held_port,
    "killed_process": killed_process,
    "killed_with_leftovers": killed_with_leftovers,
    "late_purge": late_purge,
    "launch_argument": launch_argument,
    "launch_dtype": launch_dtype,
    "launch_environment": launch_environment,
    "leftover_consolidated": leftover_consolidated,
    "leftover_shards": leftover_shards,
    "memory_limit": memory_limit,
    "mismatched_config": mismatched_config,
    "mismatched_draft": mismatched_draft,
    "missing_chat_template": missing_chat_template,
    "missing_compiler": missing_compiler,
    "missing_file": missing_file,
    "missing_shard": missing_shard,
    "moved_compile_cache": moved_compile_cache,
    "narrow_tensor": narrow_tensor,
    "nested_checkpoint": nested_checkpoint,
    "nested_move": nested_move,
    "new_config_old_weights": new_config_old_weights,
    "new_weights_as_bin": new_weights_as_bin,
    "nonfinite_values": nonfinite_values,
    "old_config_new_weights": old_config_new_weights,
    "overwrite_in_place": overwrite_in_place,
    "parallel_size": parallel_size,
    "permuted_tokenizer": permuted_tokenizer,
    "pointer_file": pointer_file,
    "port_of_old_server": port_of_old_server,
    "presharded_state": presharded_state,
    "previous_shard": previous_shard,
    "relayout_tensor": relayout_tensor,
    "removed_config": removed_config,
    "rename_prefix": rename_prefix,
    "rename_tensor": rename_tensor,
    "rsync_in_place": rsync_in_place,
    "slow_storage": slow_storage,
    "slow_sync": slow_sync,
    "small_shared_memory": small_shared_memory,
    "stale_index": stale_index,
    "stale_numpy_cache": stale_numpy_cache,
    "stale_weight_cache": stale_weight_cache,
    "stale_weight_daemon": stale_weight_daemon,
    "swap_tensors": swap_tensors,
    "token_beyond_rows": token_beyond_rows,
    "transpose_tensor": transpose_tensor,
    "truncate_shard": truncate_shard,
    "unreadable_file": unreadable_file,
    "unwritable_compile_cache": unwritable_compile_cache,
    "updated_while_asleep": updated_while_asleep,
    "widen_tensor": widen_tensor,
    "wider_weights": wider_weights,
    "woken_without_reload": woken_without_reload,
    "zero_tail": zero_tail,
}

__all__ = [
    "FAULTS",
    "Acting",
    "AdapterFault",
    "CacheFault",
    "CompileCacheFault",
    "Damage",
    "Fault",
    "Injected",
    "LaunchFault",
    "LiveFault",
    "PublishFault",
    "StartRace",
    "adapter_prefix",
    "adapter_rank",
    "adapter_width",
    "add_bias",
    "added_config",
    "anonymous_weights",
    "beyond_fp16_range",
    "broken_hub_cache",
    "cast_all",
    "cast_tensor",
    "changed_chat_template",
    "changed_while_loading",
    "cold_compile_cache",
    "cold_prefix_cache",
    "compile_in_traffic",
    "context_length",
    "cut_json",
    "damage_header",
    "damaged_compile_cache",
    "drop_tensor",
    "extend_shard",
    "flip_bit",
    "flip_dtype_in_header",
    "forbidden_socket",
    "foreign_file",
    "foreign_kernels",
    "frozen_process",
    "full_disk",
    "full_shared_memory",
    "generation_defaults",
    "held_device_memory",
    "held_port",
    "killed_process",
    "killed_with_leftovers",
    "late_purge",
    "launch_argument",
    "launch_dtype",
    "launch_environment",
    "leftover_consolidated",
    "leftover_shards",
    "memory_limit",
    "mismatched_config",
    "mismatched_draft",
    "missing_chat_template",
    "missing_compiler",
    "missing_file",
    "missing_shard",
    "moved_compile_cache",
    "narrow_tensor",
    "nested_checkpoint",
    "nested_move",
    "new_config_old_weights",
    "new_weights_as_bin",
    "nonfinite_values",
    "old_config_new_weights",
    "overwrite_in_place",
    "parallel_size",
    "permuted_tokenizer",
    "pointer_file",
    "port_of_old_server",
    "presharded_state",
    "previous_shard",
    "relayout_tensor",
    "removed_config",
    "rename_prefix",
    "rename_tensor",
    "rsync_in_place",
    "slow_storage",
    "slow_sync",
    "small_shared_memory",
    "stale_index",
    "stale_numpy_cache",
    "stale_weight_cache",
    "stale_weight_daemon",
    "swap_tensors",
    "token_beyond_rows",
    "transpose_tensor",
    "truncate_shard",
    "unreadable_file",
    "unwritable_compile_cache",
    "updated_while_asleep",
    "widen_tensor",
    "wider_weights",
    "woken_without_reload",
    "zero_tail",
]

if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> None:
        raise AttributeError(f'fault "{name}" is unknown; faults: {", ".join(sorted(FAULTS))}')
