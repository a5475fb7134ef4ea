"""The catalogue's entries of everything else: how a checkpoint is published, how engines are started, what strikes them."""

from __future__ import annotations

from harness.faults.entry import NOTHING, Entry

OF_ENGINES: dict[str, Entry] = {
    "adapter_prefix": Entry(
        what="The adapter's tensors are named after modules that the base has not: it is loaded and changes nothing.",
        by_hand="`harness damage ADAPTER --fault adapter_prefix --base CHECKPOINT --out DIR`, or with `safetensors` on a copy: "
        "`t = {k.replace('model.layers.', 'model.language_model.layers.'): v for k, v in load_file(f).items()}; save_file(t, f)`",
        reports=("vllm-project/vllm#34186", "vllm-project/vllm#55193"),
        needs=("a rollout of adapters, `rollout.update_adapter()`",),
        cost="the adapter",
    ),
    "adapter_rank": Entry(
        what="The adapter is of a higher rank than the engine was started for; it computes the same.",
        by_hand="`harness damage ADAPTER --fault adapter_rank --base CHECKPOINT --out DIR`, or on a copy: pad both factors of every module with zeros, and raise `r` and `lora_alpha` alike",
        reports=("vllm-project/vllm#34591",),
        needs=("a rollout of adapters, `rollout.update_adapter()`",),
        cost="the adapter",
    ),
    "adapter_width": Entry(
        what="The adapter was trained on a base with a larger hidden size.",
        by_hand="`harness damage ADAPTER --fault adapter_width --base CHECKPOINT --out DIR`, or load one of another base of the same family",
        needs=("a rollout of adapters, `rollout.update_adapter()`",),
        cost="the adapter",
    ),
    "anonymous_weights": Entry(
        what="Old and new are served under one name from one path, so `/v1/models` cannot tell them apart.",
        by_hand="restart with the same `--served-model-name` at the same path after the bytes there have changed",
        cost=NOTHING,
    ),
    "changed_while_loading": Entry(
        what="A weight file is cut short, or the other checkpoint's is written over it, while a starting engine has read some of "
        "its tensors and not all: the kernel says how far it is.",
        by_hand="while the engine loads: `truncate -s 4096 live/model.safetensors`, or `cp old/model.safetensors live/`",
        needs=("files of more than 4 MiB, so that the engine is seen in the middle",),
        cost="one shard, put back afterwards",
    ),
    "cold_compile_cache": Entry(
        what="The new engine compiles everything anew, as on a machine that has no cache yet, and is ready later.",
        by_hand="start with another, empty directory as `VLLM_CACHE_ROOT`",
        needs=("an engine that compiles",),
        cost="the compile cache",
    ),
    "cold_prefix_cache": Entry(
        what="What users' prompts share was cached in the old process; the new one reads it all again.",
        by_hand="restart a warm server, and send prompts that begin alike: `vllm:prefix_cache_hits_total` starts at zero",
        needs=("an engine with a prefix cache: vLLM", "a load with `shared_tokens`"),
        cost=NOTHING,
    ),
    "compile_in_traffic": Entry(
        what="The engine is healthy before it has compiled what requests need: the first ones wait for the compiler.",
        by_hand="vLLM on a CPU: start without `TORCHDYNAMO_DISABLE=1`, send a request with `logprobs` once `/health` says 200",
        needs=("vLLM on a CPU, with a C++ compiler",),
        cost=NOTHING,
    ),
    "context_length": Entry(
        what="The engine is launched with a longer context than the config allows.",
        by_hand="`vllm serve MODEL --max-model-len 1000000`",
        cost=NOTHING,
    ),
    "damaged_compile_cache": Entry(
        what="Files of the compile cache hold other bytes than were written: cut, empty, or one bit flipped.",
        by_hand="`truncate -s 100 $VLLM_CACHE_ROOT/torch_compile_cache/torch_aot_compile/*/rank_0_0/model`, then restart",
        reports=("vllm-project/vllm#21858", "ls1intum/edutelligence#579"),
        needs=("an engine that compiles",),
        cost="the compile cache",
    ),
    "forbidden_socket": Entry(
        what="The new engine should serve on a Unix socket in a directory where its user may make none.",
        by_hand="`vllm serve MODEL --uds /sys/engine.sock`; or, not as root, any directory that belongs to somebody else",
        cost=NOTHING,
    ),
    "foreign_kernels": Entry(
        what="The compiled kernels in the cache say that they were made for another runtime, as in a cache that is kept across an "
        "upgrade.",
        by_hand="`printf '\\377' | dd of=KERNEL bs=1 seek=8 conv=notrunc` for each `*.cubin` and `*.so` below `$VLLM_CACHE_ROOT`, then restart",
        needs=("an engine that keeps compiled kernels: vLLM that compiles",),
        cost="the compiled kernels",
    ),
    "frozen_process": Entry(
        what="The process that computes is stopped: it is alive, connections stay open, and no answer comes.",
        by_hand="`kill -STOP` of the process `VLLM::EngineCore`; `kill -CONT` undoes it",
        cost=NOTHING,
    ),
    "full_disk": Entry(
        what="The disk is full before a copy over the live files is complete.",
        by_hand="`mount -t tmpfs -o size=2m tmpfs DIR`, then `cp` more into it than fits",
        needs=("root, for a small file system of its own",),
        cost="the live files, on a small file system in memory",
    ),
    "full_shared_memory": Entry(
        what="The container's `/dev/shm` is full while its engine serves.",
        by_hand="in the container: `dd if=/dev/zero of=/dev/shm/filler`",
        needs=("an engine in a container",),
        cost="the container's own shared memory",
    ),
    "held_device_memory": Entry(
        what="Another process, as an old engine that did not end, holds nearly all memory of the GPU while the new one starts.",
        by_hand="start a second `vllm serve` on the GPU of one that serves, with the default `--gpu-memory-utilization`",
        reports=(
            "vllm-project/vllm#20305",
            "vllm-project/vllm#42017",
            "llm-d-incubation/llm-d-fast-model-actuation#720",
        ),
        needs=("vLLM on a GPU",),
        cost="nothing on disk; the device memory",
    ),
    "held_port": Entry(
        what="The new engine should listen where the old one still does; health checks are answered by the old one.",
        by_hand="start the new engine with the `--port` of the old one, without stopping that",
        needs=("an engine on the host's network: process or reference",),
        cost=NOTHING,
    ),
    "killed_process": Entry(
        what="The engine core, a worker or the server ends by a signal while it serves.",
        by_hand="`kill -KILL` (or `-SEGV`) of the process `VLLM::EngineCore`",
        cost=NOTHING,
    ),
    "killed_with_leftovers": Entry(
        what="Every process of the engine is killed at once; the next one starts among what they left in `/dev/shm`.",
        by_hand="`kill -KILL` of the server and of all its children, then start the next engine",
        cost=NOTHING,
    ),
    "late_purge": Entry(
        what="The weight cache is purged after the new engine has begun to read it.",
        by_hand="`rm -r /dev/shm/vllm_weight_cache/*` while the engine loads",
        needs=("an engine with the weight cache",),
        cost=NOTHING,
    ),
    "launch_argument": Entry(
        what="The launch line has an argument that this release does not know, or with a wrong value.",
        by_hand="`vllm serve MODEL --disable-weight-cache`",
        reports=("vllm-project/vllm#1114",),
        cost=NOTHING,
    ),
    "launch_dtype": Entry(
        what='The launch asks for another dtype, or spells one wrongly ("fp16").',
        by_hand="`vllm serve MODEL --dtype float16`",
        reports=("vllm-project/vllm#14126", "vllm-project/vllm#1823", "vllm-project/vllm-ascend#562"),
        cost=NOTHING,
    ),
    "launch_environment": Entry(
        what="An environment variable is set that this release does not know, and ignores.",
        by_hand="`VLLM_WEIGHT_CACHE_PATH=/dev/shm/elsewhere vllm serve MODEL`",
        cost=NOTHING,
    ),
    "memory_limit": Entry(
        what="The engine reaches its memory limit: in a container the kernel kills, elsewhere an allocation fails.",
        by_hand="`docker update --memory` to little more than it holds, or `prlimit --as`",
        cost=NOTHING,
    ),
    "mismatched_draft": Entry(
        what="The engine is launched to speculate with a draft model whose vocabulary is not its target's.",
        by_hand='`vllm serve MODEL --speculative-config \'{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 2}\'`',
        reports=("vllm-project/vllm#5203", "vllm-project/vllm#45669"),
        needs=("an engine that speculates with a draft model: vLLM",),
        cost="a small model beside the checkpoint",
    ),
    "missing_compiler": Entry(
        what="The engine compiles what its first requests need, as in production, and there is no compiler.",
        by_hand="vLLM on a CPU: `CXX=/nonexistent/g++ vllm serve MODEL`, then a request with `logprobs`",
        needs=("vLLM on a CPU",),
        cost=NOTHING,
    ),
    "moved_compile_cache": Entry(
        what="The compile cache lies in another place than it was made in, as a volume that is mounted elsewhere.",
        by_hand="`mv $VLLM_CACHE_ROOT ELSEWHERE; VLLM_CACHE_ROOT=ELSEWHERE vllm serve MODEL`",
        reports=("vllm-project/vllm#52154",),
        needs=("an engine that compiles",),
        cost=NOTHING,
    ),
    "nested_move": Entry(
        what="`mv new live` into a directory that exists, as part of a rollout.",
        by_hand="`mv new live` where `live` exists",
        needs=("a rollout",),
        cost="the checkpoint",
    ),
    "overwrite_in_place": Entry(
        what="The files of the live checkpoint are written over while an engine may read them.",
        by_hand="`cp new/* live/`",
        reports=("huggingface/safetensors#762", "NVIDIA/TensorRT-LLM#17368"),
        needs=("a rollout",),
        cost="the checkpoint",
    ),
    "parallel_size": Entry(
        what="The tensor parallel size does not divide the attention heads.",
        by_hand="`vllm serve MODEL --tensor-parallel-size 3`",
        reports=(
            "vllm-project/vllm#2652",
            "vllm-project/vllm#31474",
            "vllm-project/vllm#52435",
            "vllm-project/vllm#51130",
            "vllm-project/vllm#46441",
        ),
        cost=NOTHING,
    ),
    "port_of_old_server": Entry(
        what="The old server was not stopped and keeps the port: health checks of the new one are answered by the old.",
        by_hand="start the new server with the `--port` of the old one while that still runs",
        needs=("engines that share the host's network: not containers", "blue-green rollouts"),
        cost=NOTHING,
    ),
    "rsync_in_place": Entry(
        what="Changed blocks are written into the live files under a running engine.",
        by_hand="`rsync --inplace new/ live/`",
        reports=("huggingface/safetensors#762",),
        needs=("a rollout",),
        cost="the checkpoint",
    ),
    "slow_storage": Entry(
        what="Opening each weight file takes seconds, as on a network share or a cold object store; no byte is wrong.",
        by_hand="hold a write lease (`fcntl(fd, F_SETLEASE, F_WRLCK)`) on each file, and give it back some seconds after it was asked for",
        needs=("a file system with leases: ext4, xfs, tmpfs and others, no network file system",),
        cost=NOTHING,
    ),
    "slow_sync": Entry(
        what="The engine is started while the copy of the new checkpoint still runs.",
        by_hand="`rsync --bwlimit=10M new/ live/ & vllm serve live`",
        reports=("caikit/caikit#361", "vllm-project/vllm#50633", "vllm-project/vllm#31726"),
        needs=("a rollout",),
        cost="the checkpoint",
    ),
    "small_shared_memory": Entry(
        what="The engine's container is started with very little shared memory.",
        by_hand="`docker run --shm-size 64k`",
        needs=("an engine in a container",),
        cost=NOTHING,
    ),
    "stale_weight_cache": Entry(
        what="A weight cache outlives the old checkpoint and answers for the new one.",
        by_hand="restart on new bytes at the old path without emptying the cache",
        reports=("vllm-project/vllm#56472", "vllm-project/vllm#56010"),
        needs=("an engine with the weight cache",),
        cost=NOTHING,
    ),
    "stale_weight_daemon": Entry(
        what="vLLM's own weight cache, a process that keeps weights in device memory, was filled from the old checkpoint and "
        "answers for the new one: it knows a checkpoint by the headers of its files.",
        by_hand="`vllm preload --model live`, publish a checkpoint of the same shapes over `live`, `vllm serve live --load-format ipc_cache`",
        reports=("vllm-project/vllm#56472", "vllm-project/vllm#56010"),
        needs=("a GPU", "vLLM 0.30.0 or later as a child process", "old and new weights of the same layout"),
        cost="nothing on disk; the weights once more in device memory",
    ),
    "updated_while_asleep": Entry(
        what="The engine is told to read its weights while it sleeps and has no device memory for them.",
        by_hand="`POST /sleep?level=1`, then `POST /collective_rpc` with `reload_weights`, then `POST /wake_up`",
        needs=("vLLM on a GPU, with `--enable-sleep-mode` and development endpoints",),
        cost=NOTHING,
    ),
    "unwritable_compile_cache": Entry(
        what="Nobody can write to the compile cache: no permission, or a file where its directory belongs.",
        by_hand="`chmod -R a-w $VLLM_CACHE_ROOT`, or `rm -r` the directory `torch_compile_cache` in it and `touch` a file of that name",
        needs=("an engine that compiles",),
        cost="a small file",
    ),
    "woken_without_reload": Entry(
        what="The engine slept at level 2, which drops its weights, was woken, and nobody loaded them again.",
        by_hand="`POST /sleep?level=2`, then `POST /wake_up`, and no reload",
        reports=(
            "vllm-project/vllm#54235",
            "vllm-project/vllm#16564",
            "NVIDIA-NeMo/RL#2631",
            "huggingface/trl#5312",
            "vllm-project/vllm#34600",
            "NovaSky-AI/SkyRL#1365",
        ),
        needs=("vLLM on a GPU, with `--enable-sleep-mode` and development endpoints",),
        cost=NOTHING,
    ),
}
