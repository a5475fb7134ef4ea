"""The fault list: what is wrong under each id, what vLLM does about it by itself, and whether pre-flight sees it.

"Engine" is vLLM 0.32.0: loud refuses to start, silent starts and serves. "Measured" was seen on CPU; the rest was read in
its source. A row that nothing injects says why.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One id of the fault list; `gap` says why no fault injects it, and is empty where one does."""

    what: str
    engine: str
    preflight: str
    gap: str = ""


ROWS: dict[str, Row] = {
    # weight files
    "D01": Row("shard truncated, extended, or its header damaged", "loud (measured)", "yes"),
    "D02": Row("something else under a weight file's name: pointer file, web page, zeros", "loud (measured)", "yes"),
    "D03": Row("a shard that the weight index names is absent", "loud (measured)", "yes"),
    "D04": Row("a whole tensor is absent", "silent for linear layers and head (measured)", "yes"),
    "D05": Row("one part of a fused parameter is absent, such as `k_proj`", "silent (measured)", "yes"),
    "D06": Row("a norm is absent", "loud (measured)", "yes"),
    "D07": Row(
        "a tensor is smaller than the config says, or another shape", "loud, mostly without a name (measured)", "yes"
    ),
    "D08": Row("a tensor is larger in a sharded dimension", "silent: cut (measured)", "yes"),
    "D09": Row("a tensor of unknown name", "loud (measured)", "yes"),
    "D10": Row("biases that the config does not ask for", "silent: dropped (measured)", "yes"),
    "D11": Row(
        "left-over files beside the new ones, without a weight index",
        "silent: the last one read wins (measured)",
        "yes",
    ),
    "D12": Row("a weight index that belongs to other files", "silent: the index wins", "yes"),
    "D13": Row("old safetensors beside new `.bin` files", "silent: safetensors win (measured)", "yes"),
    "D14": Row("left-over `consolidated*.safetensors`", "silent: the whole load switches to them (measured)", "yes"),
    "D15": Row(
        "same header, other bytes: zero tail, transposed, not finite",
        "silent (measured)",
        "zeros and NaN with `--verify`; other bytes with a manifest; else only a canary",
    ),
    "D16": Row("dtypes that differ from the config or from each other", "silent: cast (measured)", "yes"),
    "D17": Row("a checkpoint nested in the old one, by `mv`", "silent: the old one is served (measured)", "yes"),
    "D18": Row("files written over in place", "depends on what is read when", "depends on the moment"),
    "D19": Row(
        "the engine starts before the copy is complete", "depends on what is late", "yes, if run when the engine starts"
    ),
    "D20": Row("a file that cannot be read", "loud (measured)", "yes"),
    "D21": Row(
        "a hub cache that resolves to a snapshot without weights, or to an incomplete one",
        "loud with a new hub client, depends on an old one",
        "no: it reads a checkpoint, not a hub cache",
    ),
    "D22": Row(
        "`np/` of the previous `.bin` under `--load-format npcache`",
        "silent: the old one is served (measured)",
        "after `--`, with `--verify`; else a risk",
    ),
    "D23": Row(
        "a state saved for another tensor parallel size",
        "silent for fewer ranks than it was saved for: half of each parameter is never filled (its loader, measured)",
        "yes",
    ),
    # config, tokenizer, templates
    "C01": Row("another number of layers in the config", "loud (measured)", "yes"),
    "C02": Row(
        "other sizes in the config", "loud where weights are too small, silent where too large (measured)", "yes"
    ),
    "C03": Row("another vocabulary size", "loud", "yes"),
    "C04": Row(
        "tied embeddings and `lm_head` disagree",
        "silent if it is absent and untied (measured)",
        "yes; a head that is there but not needed is a risk",
    ),
    "C05": Row("a value that no weight shows: rope, epsilon", "silent (measured)", "with `--against OLD`"),
    "C06": Row("an architecture that is not known", "loud", "as a risk"),
    "C07": Row(
        "bf16 values that fp16 cannot hold",
        "silent: infinite (measured)",
        "as a risk; with `--verify` and `--dtype float16` it blocks",
    ),
    "C08": Row("config and tensors disagree about quantisation", "loud or silent", "yes"),
    "C09": Row(
        "token ids beyond the embedding; another tokenizer",
        "dies on first use (measured)",
        "yes; other content with `--against OLD`",
    ),
    "C10": Row("another chat template", "silent", "with `--against OLD`"),
    "C11": Row("other generation defaults", "silent", "with `--against OLD`"),
    "C12": Row("config, index or tokenizer absent, cut or not JSON", "loud (measured)", "yes"),
    # launch
    "L01": Row("a misspelt dtype, an unknown flag", "loud, exit code 2 (measured)", "after `--`"),
    "L02": Row("an unknown `VLLM_*` variable", "a warning (measured)", "after `--`, as a risk"),
    "L03": Row("a tensor parallel size that does not divide the heads", "loud (measured)", "after `--`"),
    "L04": Row("`--max-model-len` beyond the config", "loud (measured)", "after `--`"),
    "L05": Row(
        "the port is still held by the old engine",
        "loud in the new engine; probes are answered by the old one",
        "with `--check-host`",
    ),
    "L06": Row(
        "same served name at the same path",
        "nobody can tell which checkpoint is served",
        "no: version the path, or name the weights in `--served-model-name`",
    ),
    # process, memory, shared memory
    "M01": Row(
        "`/dev/shm` too small or full",
        "hangs or dies with more than one worker",
        "with `--check-host`",
    ),
    "M02": Row(
        "left-overs of a killed server in shared memory",
        "two segments stay after SIGTERM with two workers (measured)",
        "no",
    ),
    "M03": Row(
        "engine core or worker killed",
        "503, then the server ends with exit code 0 (measured)",
        "no",
    ),
    "M04": Row(
        "engine core frozen",
        "requests hang, `/health` stays 200 (measured)",
        "no",
    ),
    "M05": Row("the host kills a process that took too much memory", "exit code 137", "no"),
    "M06": Row("the old process still holds device memory", "loud, not every time", "no"),
    "M07": Row(
        "no permission for a port or a socket path",
        "loud (measured)",
        "with `--check-host`",
    ),
    "M08": Row(
        "crash by signal",
        "the server ends with exit code 0 (measured with SIGSEGV)",
        "no",
    ),
    "M09": Row(
        "no C++ compiler for an engine that compiles at its first requests",
        "200 from `/health`, then dead (measured)",
        "no",
    ),
    # caches
    "K01": Row(
        "a file of the compile cache is damaged",
        "cut: compiled again, with a warning and other rounding; bits flipped: refused at start-up (measured)",
        "no",
    ),
    "K02": Row("a compile cache of another place or machine", "compiled again, answers are right (measured)", "no"),
    "K03": Row(
        "a kernel cache kept across an upgrade of the runtime",
        "on a CPU refused at start-up with a compiler error (measured), where compiling anew would do",
        "no",
    ),
    "K04": Row("a cache directory that cannot be written to", "refused at start-up (measured)", "with `--check-host`"),
    "K05": Row(
        "a weight cache that holds the previous weights",
        "same layout silent, other layout a crash (measured with our plug-in); `ipc_cache` reads another layout from disk",
        "no: purge, and a canary",
    ),
    # live update
    "U01": Row("sleep, wake, no reload", "silent", "no"),
    "U02": Row(
        "reload in place from a bad checkpoint",
        "a silent mixture, or dead at the next request (measured)",
        "of the new path: yes",
        "a way to roll out, with any damage: `rollout.reload_in_place()`",
    ),
    "U03": Row(
        "prefix cache not reset after an update",
        "silent: old KV is used (measured)",
        "no",
        "a way to roll out: `rollout.reload_in_place(reset_prefix_cache=False)`",
    ),
    "U04": Row("an update of an engine that sleeps", "open", "no"),
    "U05": Row(
        "a LoRA adapter of another rank or width",
        "500; one of another width, in place, spoils the one that was served (measured)",
        "no",
    ),
    "U06": Row("a LoRA adapter whose names match nothing", "silent: the base answers (measured)", "no"),
    "U07": Row(
        "a LoRA adapter loaded again under its name",
        "400 without `load_inplace`, silent with it and after an unload: stale KV; up to 0.30.0 also from another path (measured)",
        "no",
        'a way to roll out: `rollout.update_adapter()` with `from_new_path=False`, `"again"`, `"unloaded"` or `"untold"`',
    ),
    "U08": Row(
        "a draft model that does not fit its target",
        "loud on the vocabulary, else slow: no proposal is accepted (measured)",
        "no",
    ),
    "U09": Row(
        "an update in parts",
        "a warning about parameters for each part",
        "no",
        "noise in a log, not a wrong answer: `harness explain` knows the line",
    ),
    # serving and latency
    "P01": Row(
        "a router answers from a fallback model",
        "not the engine's doing",
        "no",
        "vLLM has no fallback model: this is about a router, which the harness does not start",
    ),
    "P02": Row("cold compile cache", "slow start (measured)", "no"),
    "P03": Row("kernels compiled in live traffic", "the first requests wait (measured)", "no"),
    "P04": Row("prefix cache empty after a restart", "slow first tokens", "no"),
    "P05": Row(
        "another engine release is slower",
        "other latency",
        "no",
        "no fault but a comparison: `harness compare` answers it",
    ),
    "P06": Row("traffic before the engine is warm", "slow first answers (measured)", "no"),
    "N01": Row("slow or flaky storage", "waits; after 600 s it gives up", "no"),
}
