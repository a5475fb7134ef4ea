"""Where a golden file comes from: an engine that runs already, or one started for it. Options are `harness golden`'s."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from harness.checkpoint.manifest import read_checkpoint, weights_id
from harness.errors import HarnessError, UsageError
from harness.guards.canary import UNKNOWN, Golden
from harness.guards.engine_api import EngineApi, tls_context
from harness.guards.finding import printable
from harness.observe.canary_prompts import canary_prompts, deep_prompt
from harness.observe.golden import Forward, GoldenRequest, measure_golden, require_agreement
from harness.observe.noise import DEEP_OUTPUT_TOKENS, measure_answers

SAFE_VOCABULARY = (
    256  # what is asked where nobody says how large the vocabulary is: an id beyond it could end an engine
)
DEEP_TOKENS = 300


def from_running(options: argparse.Namespace) -> Golden:
    """Ask the engine at an address. What it does not say about itself stays unknown."""
    api = EngineApi(
        url=options.url,
        limit_s=options.limit_s,
        api_key=os.environ.get(options.api_key_env),
        tls=tls_context(options.ca_file, insecure=options.insecure),
    )
    try:
        served = api.served()
        version = api.version()
    except (OSError, ValueError) as error:
        raise HarnessError(f"no usable answer from {options.url}: {str(error) or type(error).__name__}") from error
    vocabulary = options.vocabulary or _vocabulary_of(options.checkpoint) or SAFE_VOCABULARY
    prompts = canary_prompts(vocabulary, seed=options.seed, count=options.prompts)
    answers = measure_answers(
        api,
        options.model or served.model,
        prompts,
        vocabulary_size=vocabulary,
        seed=options.seed,
        deep=_deep(options, vocabulary, served.max_model_len),
        under_load=options.under_load,
    )
    forward = None if options.checkpoint is None else _forward(options.checkpoint)
    who = f'the engine at {options.url}, asked as one that serves "{options.checkpoint}",'
    if options.checkpoint is None:
        who = f"the engine at {options.url}"
    require_agreement(answers, options.checkpoint, prompts, forward, who)
    length = () if served.max_model_len is None else (f"max_model_len={served.max_model_len}",)
    return Golden(
        weights_id=UNKNOWN if options.checkpoint is None else weights_id(options.checkpoint),
        engine=f"version {version}" if version else UNKNOWN,
        build=UNKNOWN,
        hardware=options.hardware,
        flags=(*length, *options.engine_arguments),
        prompts=prompts,
        prompt_logprobs=answers.prompt_logprobs,
        noise_max=answers.noise_max,
        noise_checks=answers.noise_checks,
        tolerance=answers.tolerance,
        source=f"a running engine, {'under load of ours' if options.under_load else 'as it was'}",
        vocabulary_size=vocabulary,
        streamed=answers.streamed,
        deep=answers.deep,
    )


def from_cold_start(options: argparse.Namespace) -> Golden:
    """Start an engine of our own on the checkpoint, ask it idle and under load, and stop it."""
    from harness import sweep, watchdog
    from harness.engine.choose import starter_for
    from harness.engine.engine import EngineSite
    from harness.engine.launch import Launch
    from harness.label import new_label, work_directory
    from harness.settings import Settings

    source: Path = options.checkpoint
    vocabulary = options.vocabulary or _vocabulary_of(source)
    if vocabulary is None:
        raise UsageError(f'the config of "{source}" names no vocab_size: give --vocabulary')
    gpus = tuple(part.strip() for part in options.gpus.split(",") if part.strip())
    settings = Settings(
        engine=options.engine,
        image=options.image,
        gpus=gpus,
        python=None if options.python is None else options.python.absolute(),
        max_model_len=options.max_model_len,
        memory_gib=options.memory_gib,
        engine_arguments=options.engine_arguments,
        **({} if options.vllm_version is None else {"vllm_version": options.vllm_version}),
    )
    logs = options.out.with_name(f"{options.out.name}.logs")
    starter = starter_for(settings, progress=tell)
    label, api_key = new_label(), secrets.token_urlsafe(24)
    request = GoldenRequest(
        source=source,
        weights_id=weights_id(source),
        launch=Launch(
            checkpoint_root=source.absolute().parent,
            checkpoint_name=source.absolute().name,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            extra_arguments=options.engine_arguments,
        ),
        prompts=canary_prompts(vocabulary, seed=options.seed, count=options.prompts),
        vocabulary_size=vocabulary,
        deep=_deep(options, vocabulary, options.max_model_len),
    )
    with ExitStack() as stack:
        stack.enter_context(watchdog.watch(label))
        # Also what an interrupt came upon half made, which nobody else knows of.
        stack.callback(sweep.end, label, docker=options.engine == "container")
        work = work_directory(label)
        work.mkdir(mode=0o711)
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        starter.identity()  # what is missing is said before anything is made
        stack.callback(starter.close)
        starter.open(
            EngineSite(
                run_label=str(label),
                log_directory=logs,
                work_directory=work / "engines",
                api_key=api_key,
                memory_limit_bytes=round(settings.memory_gib * 1024**3),
            )
        )
        tell(f'starting {starter.identity().label} on "{source}"; its log goes to "{logs}" until the golden is made')
        made = measure_golden(
            starter,
            request,
            api_key=api_key,
            seed=options.seed,
            ready_limit_s=options.ready_limit_s,
            forward=_forward(source),
        )
    shutil.rmtree(logs, ignore_errors=True)
    return made


def _forward(source: Path) -> Forward | None:
    """Return our own forward pass where it can be had; an engine that disagrees with it must not bless itself."""
    try:
        from harness.goldens import forward_pass_for

        forward = forward_pass_for(source)
    except ImportError as absent:
        tell(f"the answers are not cross-checked by our own forward pass: {absent.name} is not installed")
        return None
    if forward is None:
        tell(f'the answers are not cross-checked by our own forward pass: "{source}" is no Llama, or too large')
    return forward


def _deep(options: argparse.Namespace, vocabulary: int, max_model_len: int | None) -> tuple[int, ...] | None:
    if not options.deep:
        return None
    room = DEEP_TOKENS if max_model_len is None else max_model_len - DEEP_OUTPUT_TOKENS
    if options.deep_tokens is not None and options.deep_tokens > room:
        raise UsageError(f"--deep-tokens {options.deep_tokens}: the engine has room for {room} tokens of a prompt")
    return deep_prompt(vocabulary, seed=options.seed, length=options.deep_tokens or min(DEEP_TOKENS, room))


def _vocabulary_of(checkpoint: Path | None) -> int | None:
    size = None if checkpoint is None else read_checkpoint(checkpoint).config.get("vocab_size")
    return size if type(size) is int else None


def tell(line: str) -> None:
    """Say how far it is, to people."""
    print(printable(f"harness golden: {line}"), file=sys.stderr, flush=True)
