"""What the classifier says about logs of real runs of vLLM 0.32.0 on damaged checkpoints, and what it must not say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.observe.logs import LINE_CHARACTERS_MAX, classify, has_load_error, root_cause
from harness.observe.signatures import ECHO, ERROR, NOTE, SIGNATURES, WEAK_SIGNATURES

LOGS = Path(__file__).parent / "logs"


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "klass", "fault_id", "words", "is_load_error"),
    [
        ("truncated", "file", "D01", "incomplete metadata, file not fully covered", True),
        ("pointer", "file", "D02", "header too large", True),
        ("tokenizer_absent", "file", "D19", "Couldn't instantiate the backend tokenizer", True),
        ("config_cut", "file", "C12", "JSONDecodeError", True),
        ("weights_absent", "load", "D19", "Cannot find any model weights with", True),
        ("wider", "load", "C02", "The size of tensor a (128) must match the size of tensor b (256)", True),
        ("three_layers", "load", "C01", "Following weights were not initialized from checkpoint", True),
        ("one_layer", "load", "D09", "There is no module or parameter named 'layers.1'", True),
        ("argparse", "config", "L01", "invalid choice: 'fp16'", False),
        ("big_tokenizer", "request", "C09", "index out of range in self", False),
    ],
)
def test_the_cause_in_a_real_log(name, klass, fault_id, words, is_load_error) -> None:
    text = log(name)
    cause = root_cause(text)
    assert cause is not None
    assert (cause.klass, words in cause.text, fault_id in cause.fault_ids) == (klass, True, True)
    assert words in text.split("\n")[cause.number - 1]
    assert cause.remedy.endswith(".")
    assert has_load_error(text) is is_load_error


def test_the_log_of_a_healthy_engine_that_was_stopped_has_no_cause() -> None:
    text = log("good")
    assert "Too many open files" in text, "advice in a warning"
    assert "EngineDeadError" in text, "printed while it stops as asked"
    assert root_cause(text) is None
    assert not has_load_error(text)
    assert {line.klass for line in classify(text)} <= {"progress", "engine"}
    assert {line.weight for line in classify(text)} == {NOTE}


def test_the_last_line_is_known_and_never_the_cause() -> None:
    text = log("wider")
    last = [line for line in classify(text) if "Engine core initialization failed" in line.text][-1]
    assert last.weight == ECHO
    alone = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    assert classify(alone)[0].klass == "engine"
    assert root_cause(alone) is None


def test_an_engine_that_dies_without_being_asked_to_is_noted() -> None:
    dead = "(APIServer pid=7) ERROR 11-30 01:58:12 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    stop = (
        "(EngineCore pid=8) INFO 11-30 01:59:16 [core.py:1454] [shutdown] EngineCore: trigger received signal=SIGTERM"
    )
    assert [line.klass for line in classify(dead)] == ["engine"]
    assert classify(f"{stop}\n{dead}") == ()


@pytest.mark.parametrize(
    ("line", "klass"),
    [
        ("RuntimeError: The size of tensor a (128) must match the size of tensor b (256) at dimension 1", "load"),
        ("ValueError: Couldn't instantiate the backend tokenizer from one of:", "file"),
        ("IndexError: index out of range in self", "request"),
        ("ValueError: Out of range float values are not JSON compliant", "request"),
        ("ERROR CheckpointDefect data_section_short: \"model.safetensors\", byte 1,024: cut", "file"),
        ("ERROR CheckpointDefect unexpected_shape: \"model.safetensors\", tensor \"x\": [1]", "load"),
        ("ERROR CheckpointDefect missing_tensor: \"model\", tensor \"x\": absent", "load"),
        ("ERROR CheckpointDefect config_not_json: \"config.json\": cut", "file"),
        ("ERROR CheckpointDefect something_new: \"config.json\": cut", "load"),
        ("(Worker_TP1 pid=9) ERROR 01-01 00:00:00 [x.py:1] KeyError: 'layers.3.mlp.gate.weight'", "load"),
        ("(VllmWorker rank=0 pid=9) ERROR 01-01 00:00:00 [x.py:1] AssertionError", "load"),
        ("(EngineCore_DP0 pid=9) torch.OutOfMemoryError: CUDA out of memory. Tried", "memory"),
        ("OSError: [Errno 98] Address already in use", "engine"),
        ("OSError: [Errno 28] No space left on device", "file"),
        ("PermissionError: [Errno 13] Permission denied: '/models/live/model.safetensors'", "file"),
        ("!!!!!!! Segfault encountered !!!!!!!", "signal"),
        ("Fatal Python error: Bus error", "signal"),
        ("INFO 01-01 00:00:00 [x.py:1] weight cache: hit, 21 tensors, 1048 bytes, entry abc", "cache"),
        ("Killed", "engine"),
        ("WARNING 01-01 00:00:00 [x.py:1] Following weights were not loaded from checkpoint: {'a'}", "load"),
    ],
)  # fmt: skip
def test_one_line(line, klass) -> None:
    assert [found.klass for found in classify(line)] == [klass]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "The engine is ready.",
        "INFO:     127.0.0.1:36280 - \"POST /v1/completions HTTP/1.1\" 200 OK",
        "WARNING 01-01 00:00:00 [s.py:1] This can cause errors like `OSError: [Errno 24] Too many open files`.",
        "INFO 01-01 00:00:00 [s.py:1] if you see Permission denied or No space left on device, read the guide",
        "INFO 01-01 00:00:00 [s.py:1] Segmentation fault handler enabled",
        '    raise OSError(f"{path} is not a valid JSON file.")',
        '(Worker pid=3) ERROR 01-01 00:00:00 [m.py:1]     raise ValueError("There is no module or parameter named")',
        '  File "/x/y.py", line 3, in Cannot find any model weights with',
        "              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "=" * 80,
        "prompt: 'tell me about KeyError and Killed bees'",
        "nanobind: leaked 4 instances!",
    ],
)  # fmt: skip
def test_lines_that_mean_nothing(line) -> None:
    assert classify(line) == ()


@pytest.mark.parametrize("corpus", ["requests", "starting"])
def test_what_engines_print_when_all_is_well_is_not_classified(corpus: str) -> None:
    text = (Path(__file__).parent / "negative" / f"{corpus}.log").read_text(encoding="utf-8")
    assert text.count("\n") > 10
    assert classify(text) == ()


BEFORE = (
    "Nov 30 01:58:12 gpu-1 vllm[123]: ",
    "Nov  3 01:58:12 gpu-1.example vllm: ",
    "2026-11-30T01:58:12+0000 gpu-1 vllm[123]: ",
    "2026-11-30T01:58:12.123456789Z ",
    "2026-11-30T01:58:12.123456789Z stderr F ",
    "vllm-1  | ",
    "[pod/vllm-0/server] ",
    "[pod/vllm-0/server] 2026-11-30T01:58:12.1Z ",
    "vllm-1  | 2026-11-30T01:58:12Z ",
)


@pytest.mark.parametrize("before", BEFORE)
def test_what_carries_a_line_is_left_out(before: str) -> None:
    (found,) = classify(f"{before}(EngineCore pid=8) ERROR 11-30 01:58:12 [core.py:1] KeyError: 'lm_head.weight'")
    assert found.text == "KeyError: 'lm_head.weight'"
    assert classify(f"{before}INFO 11-30 01:58:12 [x.py:1] There is no module or parameter named") == ()
    assert classify(f'{before}  File "x.py", line 3, in There is no module or parameter named') == ()


@pytest.mark.parametrize(
    ("line", "klass", "fault_id"),
    [
        ("Nov 30 01:58:12 h systemd[1]: vllm.service: Main process exited, code=dumped, status=11/SEGV", "signal", "M08"),
        ("Nov 30 01:58:12 h systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL", "memory", "M05"),
        ("Nov 30 01:58:12 h kernel: Out of memory: Killed process 123 (VLLM::EngineCor) total-vm:1kB", "memory", "M05"),
        ("vllm-1 exited with code 137", "memory", "M05"),
        ("vllm-1 exited with code 135", "signal", "D18"),
        ("INFO 01-01 00:00:00 [shm_broadcast.py:1] No available shared memory broadcast block found in 60 seconds.", "engine", "M01"),
        ("WARNING 01-01 00:00:00 [x.py:1] loading tensor of shape torch.Size([2]) into parameter 'a' of shape torch.Size([4])", "load", "D23"),
        ("INFO 01-01 00:00:00 [x.py:1] SpecDecoding metrics: Avg Draft acceptance rate: 0.0%", "live", "U08"),
    ],
)  # fmt: skip
def test_what_supervisors_and_quiet_engines_print(line: str, klass: str, fault_id: str) -> None:
    (found,) = classify(line)
    assert (found.klass, fault_id in found.fault_ids) == (klass, True)


# Every string of the list that signatures were read from, as an engine prints it, with its class.
KNOWN = {
    "file": (
        "SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        "SafetensorError: Error while deserializing header: invalid JSON in header: EOF",
        "_pickle.UnpicklingError: invalid load key, 'v'.",
        "RuntimeError: PytorchStreamReader failed reading zip archive",
        "OSError: It looks like the config file at 'x' is not a valid JSON file.",
        "OSError: Can't load tokenizer for 'x'",
        "OSError: x does not appear to have a file named config.json",
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files",
        "OSError: [Errno 116] Stale file handle: 'x'",
        "RuntimeError: not a safetensors repo. Couldn't find model.safetensors.index.json",
        "MemoryError",
    ),
    "config": (
        "ValueError: Model architectures ['X'] are not supported for now.",
        "ValueError: Invalid repository ID or local directory specified: 'x'",
        "ValueError: Total number of attention heads (4) must be divisible by tensor parallel size (3).",
        "ValueError: Quantization method specified in the model config (fp8) does not match",
        "ValueError: torch.bfloat16 is not supported for quantization method awq",
        "ValueError: User-specified max_model_len (9) is greater than the derived max_model_len",
        "WARNING 01-01 00:00:00 [x.py:1] Casting torch.bfloat16 to torch.float16.",
        "pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "vllm: error: unrecognized arguments: --disable-weight-cache",
        "AssertionError: 151552 is not divisible by 6",
    ),
    "load": (
        "FileNotFoundError: Weight files referenced in index but missing: ['x']",
        "ValueError: Following weights were not initialized from checkpoint: {'x'}",
        "WARNING 01-01 00:00:00 [x.py:1] Some weights are not initialized from checkpoints: {'x'}",
        "ValueError: Attempted to load weight (torch.Size([3600])) into parameter (torch.Size([3584]))",
        "ValueError: Tried to load weights of size torch.Size([1])to a parameter of size torch.Size([2])",
        "ValueError: Missing keys ('x',) in loaded state!",
        "ValueError: Could not find checkpoint files 'x'",
        "RuntimeError: size mismatch for x.weight: copying a param with shape",
        "RuntimeError: start (0) + length (256) exceeds dimension size (128).",
        "KeyError: 'model.layers.0.mlp.down_proj.weight_scale'",
        "ValueError: Unexpected weight: x",
    ),
    "memory": (
        "ValueError: Free memory on device (1/2 GiB) on startup is less than desired GPU memory utilization (0.9)",
        "ValueError: No available memory for the cache blocks.",
        "RuntimeError: unable to open shared memory object </x> in read-write mode",
    ),
    "lora": (
        "ValueError: LoRA rank 64 is greater than max_lora_rank 16.",
        "ValueError: x is unsupported LoRA weight",
        "ValueError: The lora adapter 'x' has already been loaded.",
    ),
    "live": (
        "INFO 01-01 00:00:00 [x.py:1] Reloading weights inplace...",
        "ERROR 01-01 00:00:00 [x.py:1] Invocation of reload_weights method failed",
        "INFO 01-01 00:00:00 [x.py:1] Successfully reset prefix cache",
        "INFO 01-01 00:00:00 [x.py:1] It took 1.0 seconds to fall asleep.",
    ),
    "cache": (
        "RuntimeError: vLLM failed to compile the model. The most likely reason",
        "WARNING 01-01 00:00:00 [x.py:1] Triton kernel JIT compilation during inference: k",
        "WARNING 01-01 00:00:00 [x.py:1] Weight cache unusable (x); falling back to disk",
        "INFO 01-01 00:00:00 [x.py:1] Mapped 21 tensors from the weight cache daemon",
    ),
    "engine": (
        "OSError: [Errno 98] error while attempting to bind on address",
        "TimeoutError: RPC call to execute_model timed out.",
        "TimeoutError: Timed out waiting for engine core processes to start.",
        "RuntimeError: Worker proc VllmWorker-0 died unexpectedly, shutting down executor.",
        "vllm.engine.multiprocessing.MQEngineDeadError: Engine loop is not running.",
    ),
    "request": (
        "ValueError: As of transformers v4.44, default chat template is no longer allowed",
        "ValueError: Token id 151791 is out of vocabulary",
        "RuntimeError: CUDA error: device-side assert triggered",
    ),
}


@pytest.mark.parametrize(("klass", "line"), [(klass, line) for klass, lines in KNOWN.items() for line in lines])
def test_a_string_of_the_list_has_its_class(klass: str, line: str) -> None:
    assert [found.klass for found in classify(line)] == [klass]


def test_a_file_error_stands_before_a_load_error_printed_earlier_and_a_signal_before_both() -> None:
    load = "ValueError: There is no module or parameter named 'x'"
    file = "OSError: [Errno 5] Input/output error"
    signal = "Fatal Python error: Segmentation fault"
    assert root_cause(f"{load}\n{file}").klass == "file"
    assert root_cause(f"{load}\n{file}\n{signal}").number == 3


def test_a_note_is_never_the_cause() -> None:
    note = "WARNING 01-01 00:00:00 [c.py:1] Casting torch.bfloat16 to torch.float16."
    load = "ValueError: There is no module or parameter named 'x'"
    assert root_cause(note) is None
    assert root_cause(f"{note}\n{load}").klass == "load"


def test_garbage_and_very_long_lines_are_harmless() -> None:
    garbage = bytes(range(256)).decode("latin-1") * 40
    long = "x" * 5_000_000 + " RuntimeError: Cannot find any model weights with"
    colours = "\x1b[31mERROR\x1b[0m 01-01 00:00:00 [a.py:1] RuntimeError: Cannot find any model weights with `x`\r"
    found = classify(f"{garbage}\n{long}\n{colours}\n\x00\x00")
    assert [line.klass for line in found] == ["load"]
    assert not re.search("[\x00-\x1f]", found[0].text)
    assert found[0].text.startswith("RuntimeError")
    assert len(classify("Cannot find any model weights with " + "y" * 100_000)[0].text) <= LINE_CHARACTERS_MAX


def test_what_stands_before_a_message_is_left_out() -> None:
    for before in (
        "(EngineCore_DP0 pid=12) ERROR 11-30 01:58:12 [core.py:1512] ",
        "(VllmWorker rank=0 pid=9) ERROR 11-30 01:58:12 [a/b.py:1] ",
        "(APIServer pid=1) ",
        "ERROR 11-30 02:16:34 [reference] ",
        "\x1b[31mERROR\x1b[0m 11-30 02:16:34 ",
        "",
    ):
        (found,) = classify(f"{before}KeyError: 'lm_head.weight'")
        assert found.text == "KeyError: 'lm_head.weight'"


def test_line_numbers_count_line_feeds_only() -> None:
    assert classify("a\x0cb\x85c\u2028d\nKilled")[0].number == 2


def test_every_row_says_what_to_do_unless_it_is_only_progress() -> None:
    rows = (*SIGNATURES, *WEAK_SIGNATURES)
    assert {row.weight for row in rows} == {ERROR, NOTE, ECHO}
    assert not [row.pattern.pattern for row in rows if row.weight != NOTE and not row.remedy]
    assert not [f for row in rows for f in row.fault_ids if not re.fullmatch(r"[DCLMKUPN]\d\d", f)]


def test_no_row_can_be_reached_only_by_nobody() -> None:
    """A row whose own plain pattern is caught by an earlier row would never be used."""
    plain = re.compile(r"[\w .'-]+")
    for index, row in enumerate(SIGNATURES):
        words = row.pattern.pattern.split("|")[0]
        if plain.fullmatch(words):
            first = next(other for other in SIGNATURES if other.pattern.search(words))
            assert first is SIGNATURES[index], words


def test_a_cast_at_load_is_no_error_since_the_engine_serves_rightly_after_it() -> None:
    line = (
        "WARNING 11-30 02:52:11 [weight_utils.py:1] Attempted to load weight layers.1.mlp.down_proj.weight with dtype "
    )
    (found,) = classify(f"{line}torch.float16 into parameter with dtype torch.bfloat16")
    assert (found.klass, found.weight) == ("load", NOTE)
    assert not has_load_error(f"{line}torch.float16 into parameter with dtype torch.bfloat16")
