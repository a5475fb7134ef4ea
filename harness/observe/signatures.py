"""What engines print when something goes wrong, as one table: class, pattern, likely faults, remedy.

Patterns were read in the sources of released vLLM versions, safetensors, transformers and torch, or seen in logs of real
runs of vLLM 0.32.0. A line has the class of the first row that matches it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.observe.anchors import anchors

ERROR, NOTE, ECHO = "error", "note", "echo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One known line.

    `weight` is `error` (says what is wrong), `note` (worth knowing, no failure by itself) or `echo` (a process reporting
    that another one failed, never the cause). What is no note counts on no INFO or DEBUG line, where prompts and advice stand,
    unless it is `quiet` (engines print it there); a `loose` pattern is common in advice, so it counts on no WARNING line either.
    Every match holds one of the `words`.
    """

    klass: str
    pattern: re.Pattern[str]
    words: tuple[str, ...]
    fault_ids: tuple[str, ...]
    remedy: str
    weight: str = ERROR
    is_loose: bool = False
    is_quiet: bool = False


RECOPY = "The file on disk is not a whole checkpoint file. Copy it again to a new directory, check its size and digest, then publish by rename."
PAIR = "Weights and config belong to different models. Publish both from the same release, and compare shapes with the config before the rollout."
INCOMPLETE = "Tensors or files that the config asks for are absent. Finish the copy, and check the weight index against the directory first."
SURPLUS = "The checkpoint holds tensors that this model does not have. Take config and weights from one release, and remove files of the previous one."
CONFIG = "A config file is absent, cut or not JSON. Copy it again, whole, and publish the directory by rename."
TOKENIZER = (
    "Tokenizer files are absent or of another release. Copy them again from the release that the weights come from."
)
ACCESS = "The engine could not read a path. Check owner, mode, mount and dangling links as the engine's user sees them."
SPACE = "A file system is full. Free space or enlarge it, remove what was half-written, and copy again."
FLAG = "This engine release does not know the launch argument or its value. Compare the launch line with its --help."
ARCHITECTURE = "The engine does not know this model type. Check config.json, or use an engine release that supports it."
QUANTIZATION = "The quantization in the config and the tensors on disk do not fit. Publish config and weights from the same conversion."
DTYPE = "The launch dtype differs from the checkpoint's. Values beyond fp16's range become infinite: launch with the dtype it was saved in."
PARALLEL = (
    "The model cannot be split over this many ranks. Choose a parallel size that divides heads, vocabulary and experts."
)
LENGTH = "The KV cache does not fit the asked context length. Lower --max-model-len, or give the engine more memory."
MEMORY = (
    "Memory is held by something else, often the engine that was replaced. Wait until it has ended, then start again."
)
RESHARD = "The saved state was made for another parallel size. Save it again for this one."
UPSTREAM = "This reports the failure of another process: the cause stands further up in the log."
DEAD = "The engine's own process died. Read the log above for the cause, and restart: a supervisor may not, since the exit code can be 0."
SIGNAL = "The process was ended by a signal. Look for a file overwritten while mapped, a processor too old, or a bug; restart and keep the core file."
KILLED = "Something killed the process, most often the memory limit (exit code 137). Compare the limit with what the model needs."
PORT = "Another process holds the port, perhaps the old engine, and health checks are answered by it. Stop it first."
SHARED_MEMORY = "Shared memory between the processes is too small, full or stuck. Enlarge /dev/shm, and remove leftovers of dead engines."
LEFTOVERS = (
    "Shared memory was left behind. It is cleaned up at exit here; after a kill, remove it before the next start."
)
LIMIT = "Start-up took longer than the engine allows, often because of slow storage. Find out what was slow, or raise the limit."
RANGE = "A token id is beyond the embedding: tokenizer and weights are of different releases. Publish both together; restart, since the engine may be dead."
NONFINITE = "The model computes NaN or infinity, so its answers are worthless. Check dtype and weights; roll back."
TEMPLATE = "The checkpoint has no chat template. Add the one of its release, or pass --chat-template."
LORA = "The adapter does not fit this base model or these limits. Check rank, target modules and base; reload under a new name."
RELOAD = "An update in place failed or was incomplete: the engine may serve a mixture of old and new weights. Restart it from the right directory."
PREFIX = "The prefix cache belongs to the old weights until it is reset. Call /reset_prefix_cache after every update in place."
SLEEP = "The engine slept: after level 2 its weights are gone until they are loaded again."
COMPILE = "Compiled artefacts are damaged or from elsewhere. Delete the compile cache and start again."
COLD = "Compiling during traffic makes the first requests slow. Warm the engine up before it gets traffic."
LOCK = "A build lock may have been left by a killed process. Remove it, and start again."
DAEMON = "The weight cache daemon does not fit this checkpoint. Restart it at every rollout."
CACHE_HIT = "Weights came from the cache and not from the checkpoint: if it was overwritten at the same path, they are the old ones. Purge the cache before each rollout."
CACHE_INFO = "The weight cache is in use. Key it by content, or purge it before each rollout."
SAMPLING = "Defaults for sampling come from generation_config.json of the checkpoint; answers change with it. Compare it with the previous release's."
VARIABLE = "This engine release ignores an environment variable that was set. Check its spelling against the release."
REPLACED = "The engine follows the tensors and not the config about tied embeddings. Publish a config that agrees with the weights."
DRAFT = "The draft model is hardly ever right, so it costs time and gains none. Pair it with the target's release."
DEFECT = "The checkpoint breaks the named rule of the loading contract. Copy or build it again, and run the pre-flight before publishing."
NONE = ""


def _row(
    klass: str,
    pattern: str,
    faults: str,
    remedy: str,
    weight: str = ERROR,
    *,
    loose: bool = False,
    quiet: bool = False,
) -> Signature:
    return Signature(
        klass=klass,
        pattern=re.compile(pattern),
        words=tuple(sorted(anchors(pattern))),
        fault_ids=tuple(faults.split()),
        remedy=remedy,
        weight=weight,
        is_loose=loose,
        is_quiet=quiet,
    )


SIGNATURES: tuple[Signature, ...] = (
    # Our reference engine names the rule that a checkpoint breaks.
    _row("file", r"\bCheckpointDefect (absent_file|dangling_link|unreadable_file|not_a_regular_file|directory_\w+|no_weights)\b", "D03 D19 D20", INCOMPLETE),
    _row("file", r"\bCheckpointDefect (empty_file|zero_file|pointer_file|html_file|zip_file)\b", "D02", RECOPY),
    _row("file", r"\bCheckpointDefect (header_\w+|metadata_invalid|tensor_info_invalid|offset_\w+|size_\w+|data_section_\w+|zero_tail)\b", "D01", RECOPY),
    _row("file", r"\bCheckpointDefect (config_absent|config_not_json|index_not_json|index_entry_invalid)\b", "C12", CONFIG),
    _row("file", r"\bCheckpointDefect tokenizer_(absent|invalid)\b", "D19 C12", TOKENIZER),
    _row("config", r"\bCheckpointDefect tokenizer_\w+", "C09", RANGE),
    _row("config", r"\bCheckpointDefect config_\w+", "C06", ARCHITECTURE),
    _row("load", r"\bCheckpointDefect (missing_\w+|index_names_\w+|tensor_in_other_shard|\w+_not_in_index)\b", "D03 D04 D12", INCOMPLETE),
    _row("load", r"\bCheckpointDefect (unexpected_tensor|mixed_\w+|duplicate_\w+|nested_checkpoint|partial_download_file)\b", "D09 D11 D17", SURPLUS),
    _row("load", r"\bCheckpointDefect (unexpected_shape|unexpected_dtype|tied_embedding_skew)\b", "D07 D08 D16 C02 C04", PAIR),
    _row("load", r"\bCheckpointDefect nonfinite_values\b", "D15 C07", NONFINITE),
    _row("load", r"\bCheckpointDefect \w+", "", DEFECT),
    # The weight cache of the incident, in the reference engine and as a plug-in of real vLLM.
    _row("cache", r"weight cache: hit", "K05", CACHE_HIT, NOTE),
    _row("cache", r"weight cache: (failed to allocate|not (used|stored))", "M01", SHARED_MEMORY, NOTE),
    _row("cache", r"weight cache: ", "", CACHE_INFO, NOTE),
    # Ended by a signal: stands before everything else.
    _row("signal", r"code=(killed|dumped), status=(4/ILL|6/ABRT|7/BUS|11/SEGV)|exited with code (132|134|135|139)$", "D18 M08", SIGNAL),
    _row("signal", r"Segmentation fault|Segfault encountered|Bus error|Illegal instruction|Fatal Python error|\bSIG(SEGV|BUS|ILL|ABRT)\b", "D18 M08", SIGNAL, loose=True),
    # Files.
    _row("file", r"Error while deserializing header: ?(HeaderTooLarge|header too large|HeaderTooSmall|header too small)", "D02 D01", RECOPY),
    _row("file", r"Error while deserializing header", "D01 D02", RECOPY),
    _row("file", r"PytorchStreamReader|invalid load key|Weights only load failed|unexpected EOF", "D01 D02", RECOPY, loose=True),
    _row("file", r"Couldn't instantiate the backend tokenizer|Can't load tokenizer", "D19 C12", TOKENIZER),
    _row("file", r"is not a valid JSON file|JSONDecodeError|Can't load the configuration", "C12", CONFIG),
    _row("file", r"does not appear to have (a file named|files named)|not a safetensors repo", "D14 D19", INCOMPLETE),
    _row("file", r"\b(LocalEntryNotFoundError|EntryNotFoundError|IncompleteSnapshotError|OfflineModeIsEnabled|CacheNotFound|RepositoryNotFoundError)\b", "D21", INCOMPLETE),
    _row("file", r"No space left on device", "M01 D19", SPACE, loose=True),
    _row("file", r"Stale file handle|Input/output error|Permission denied|Too many open files", "D20", ACCESS, loose=True),
    # Config and launch arguments.
    _row("config", r"Transformers does not recognize this architecture|Model architectures .{0,200}are not supported for now|requires you to execute the configuration file", "C06", ARCHITECTURE),
    _row("config", r"Invalid repository ID or local directory specified", "C12 D19", CONFIG),
    _row("config", r"invalid choice: '|unrecognized arguments:|Input should be '|validation errors? for \w+Config|Unexpected extra config keys for load format|Unknown load_format", "L01", FLAG),
    _row("config", r"must be divisible by tensor parallel size", "L03", PARALLEL),
    _row("config", r"Quantization method specified in the model config|is not supported for quantization method|Cannot find the config file for", "C08", QUANTIZATION),
    _row("config", r"Bfloat16 is only supported on GPUs", "C07", DTYPE),
    _row("config", r"Casting torch\.\w+ to torch\.\w+", "C07 D16", DTYPE, NOTE),
    _row("config", r"User-specified max_model_len", "L04", LENGTH),
    _row("config", r"(Default|Default vLLM) sampling parameters have been overridden", "C11", SAMPLING, NOTE),
    _row("config", r"Unknown vLLM environment variable detected", "L02", VARIABLE, NOTE),
    _row("config", r"was skipped because it is tied to|says the word embeddings are tied", "C04", REPLACED, NOTE),
    # Loading weights.
    _row("load", r"Cannot find any model weights with|Weight files referenced in index but missing", "D03 D19", INCOMPLETE),
    _row("load", r"(Following|Some) weights (were|are) not initialized from checkpoint", "D03 D04 D06 C01", INCOMPLETE),
    _row("load", r"Following weights were not loaded from checkpoint", "U02", RELOAD),
    _row("load", r"There is no module or parameter named|Attempted to load nested weight", "D09 C01", SURPLUS),
    _row("load", r"Attempted to load weight .{0,200}with dtype", "D16", PAIR, weight=NOTE),  # cast, then served
    _row("load", r"Attempted to load weight|Tried to load weights of size|size mismatch for \S+ ?: copying a param with shape", "D07 C02", PAIR),
    _row("load", r"The size of tensor a \(\d+\) must match the size of tensor b", "D07 C02", PAIR),
    _row("load", r"start \(\d+\) \+ length \(\d+\) exceeds dimension size", "D07 C02", PAIR),
    _row("load", r"loading tensor of shape .{0,200}into parameter .{0,200}of shape", "D23", RESHARD, NOTE),
    _row("load", r"Missing keys .{0,500}in loaded state|Could not find checkpoint files", "D23", RESHARD),
    _row("load", r"KeyError: '?.{0,120}weight_scale", "C08", QUANTIZATION),
    _row("load", r"KeyError: 'lm_head\.weight'", "C04", PAIR),
    _row("load", r"KeyError: '(model\.)?layers\.", "D09 D14", SURPLUS),
    # Memory.
    _row("memory", r"Free memory on device .{0,200}less than desired GPU memory utilization|Error in memory profiling", "M06", MEMORY),
    _row("memory", r"No available memory for the cache blocks|To serve at least one request", "L04", LENGTH),
    _row("memory", r"Out of memory: Killed process \d+|\boom-kill\b|killed by the OOM killer|OOMKilled|code=killed, status=9/KILL|exited with code 137$", "M05", KILLED),
    _row("memory", r"CUDA out of memory|OutOfMemoryError", "M06", MEMORY),
    _row("memory", r"unable to open shared memory object", "M01", SHARED_MEMORY),
    # Requests and adapters.
    _row("request", r"index out of range in self|device-side assert triggered|srcIndex < srcSelectDimSize|index out of bounds", "C09", RANGE),
    _row("request", r"Token id -?\d+ is out of vocabulary", "C09", RANGE),
    _row("request", r"Out of range float values are not JSON compliant", "C07 D15", NONFINITE),
    _row("request", r"default chat template is no longer allowed", "C10", TEMPLATE),
    _row("lora", r"LoRA rank \d+ is greater than max_lora_rank|expected target modules in .{0,300}but received|is unsupported LoRA weight", "U05", LORA),
    _row("lora", r"The lora adapter .{0,200}has already been", "U07", LORA),
    _row("live", r"Draft acceptance rate: [0-4]\.\d+%", "U08", DRAFT, NOTE),
    # Updates in place.
    _row("live", r"Reloading weights inplace|Reloading and processing weights took", "U02", PREFIX, NOTE),
    _row("live", r"Invocation of \S+ method failed", "U02", RELOAD),
    _row("live", r"Failed to reset prefix cache", "U03", PREFIX),
    _row("live", r"Successfully reset prefix cache", "", NONE, NOTE),
    _row("live", r"Sleep mode freed|to fall asleep|to wake up tags|Executor is not sleeping", "U01", SLEEP, NOTE),
    # Caches.
    _row("cache", r"vLLM failed to compile the model|AssertionError: Expected tensors only", "K01", COMPILE),
    _row("cache", r"Using cache directory: .{0,300} for vLLM.s torch\.compile", "K02", NONE, NOTE),
    _row("cache", r"JIT compilation during inference|causes a latency spike", "P03", COLD, NOTE),
    _row("cache", r"Weight cache unusable|Weight cache IPC loading failed|WeightCacheKey mismatch on fields|Weight cache daemon at .{0,200}exited", "K05", DAEMON, NOTE),
    _row("cache", r"Mapped \d+ tensors from the weight cache daemon|Weight cache daemon READY", "K05", CACHE_HIT, NOTE),
    # The engine's processes.
    _row("engine", r"\[Errno 98\]|[Aa]ddress already in use", "L05 M07", PORT),
    _row("engine", r"Timed out waiting for engine core processes to start", "N01", LIMIT),
    _row("engine", r"No available (shared memory broadcast )?block found in", "M01 M04", SHARED_MEMORY, quiet=True),
    _row("engine", r"RPC call to .{0,200}timed out", "M04", DEAD),
    _row("engine", r"Worker proc .{0,200}died unexpectedly|engine core exited unexpectedly", "M03", DEAD),
    _row("engine", r"EngineCore failed to start|WorkerProc (failed to start|initialization failed|hit an exception)", "", UPSTREAM, ECHO),
    _row("engine", r"Engine core initialization failed|Failed core proc\(s\)", "", UPSTREAM, ECHO),
    _row("engine", r"EngineCore encountered (a fatal error|an issue)|AsyncLLM output_handler failed|Worker failed with error", "M03", UPSTREAM, ECHO),
    _row("engine", r"\b(Async|MQ)?EngineDeadError\b|Background loop has errored already|Engine loop (has died|is not running)", "M03", UPSTREAM, ECHO),
    _row("engine", r"There appear to be \d+ leaked (shared_memory|semaphore) objects", "M02", LEFTOVERS, NOTE),
    # A loop of the token 0: what uninitialised or infinite logits decode to.
    _row("output", r"!{8,}", "C07 U01", NONFINITE, loose=True),
    # How far a start came.
    _row("progress", r"Starting to load model|Filesystem type for checkpoints: .{0,200}Checkpoint size|Loading (safetensors|pt) checkpoint shards: +\d+% Completed", "", NONE, NOTE),
    _row("progress", r"Loading (model )?weights took|Model loading took|Available KV cache memory|init engine .{0,100}took [\d.]+ s", "", NONE, NOTE),
    _row("progress", r"torch\.compile (takes|took) [\d.]+ s|Directly load (the compiled graph|AOT compilation)|Compiling a graph for", "P02", NONE, NOTE),
    _row("progress", r"Starting vLLM (API )?server|Application startup complete", "P06", NONE, NOTE),
    _row("progress", r"Running: \d+ reqs", "M04", NONE, NOTE),
)  # fmt: skip

# Short strings, asked only about lines that nothing above knows.
WEAK_SIGNATURES: tuple[Signature, ...] = (
    _row("file", r"\bMemoryError\b", "D02", RECOPY, loose=True),
    _row("file", r"\bPermissionError\b", "D20 K04", ACCESS, loose=True),
    _row("file", r"No such file or directory|FileNotFoundError", "D03 D19 D20", INCOMPLETE, loose=True),
    _row("config", r"is not divisible by", "L03", PARALLEL, loose=True),
    _row("load", r"Unexpected weight", "D09", SURPLUS, loose=True),
    _row("load", r"not initialized from", "U09", INCOMPLETE, loose=True),
    _row("load", r"^AssertionError\b", "D07 C03", PAIR),
    _row("load", r"^KeyError: '", "D09 D14", SURPLUS),
    _row("engine", r"^Killed$", "M05", KILLED),
    _row("cache", r"Loading JIT ops", "K04", LOCK, NOTE),
    _row("lora", r"has already been loaded", "U07", LORA, loose=True),
)  # fmt: skip
