"""What the other scenarios leave out of the catalogue: every fault at rest, of the launch line and of a publish, once.

Must hold: with guards nobody is answered wrongly; without, the engine notices no later than it was seen to before.
Source: the fault list. Canaries are sent as token ids, so a tokenizer, a chat template or sampling defaults of another
release are harmless to them: what clients who send text would get is not asked here.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from harness import Scenario, claims, faults, models
from harness.checkpoint.models import ModelSource
from harness.faults import Fault
from scenarios.defences import BITES, LOAD, contained, qualifying

pytestmark = pytest.mark.nightly

DOWN = "model.layers.1.mlp.down_proj.weight"
OUT = "model.layers.1.self_attn.o_proj.weight"
OTHER_OUT = "model.layers.0.self_attn.o_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def with_chat_template(source: ModelSource) -> ModelSource:
    """Return the same checkpoint with a chat template: made ones have none."""

    def write(target: Path) -> None:
        assert source.write is not None
        source.write(target)
        (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")

    return replace(source, name=f"{source.name}-with-chat-template", write=write)


def restarted(
    name: str,
    *injected: Fault,
    noticed_by: str = "preflight",
    shards: int = 1,
    has_chat_template: bool = False,
) -> Scenario:
    """Return the scenario of one use of the catalogue: a restart on it, noticed with guards at this layer or earlier."""
    old, new = (models.tiny_llama(seed=seed, shards=shards) for seed in (1, 2))
    if has_chat_template:
        old, new = with_chat_template(old), with_chat_template(new)
    return Scenario(
        name=f"{name}_on_restart",
        old=old,
        new=new,
        faults=injected,
        load=LOAD,
        unguarded=BITES,
        guarded=contained(noticed_by),
    )


FILES = (
    restarted("extended_shard", faults.extend_shard()),
    restarted("damaged_header", faults.damage_header()),
    restarted("web_page_as_shard", faults.foreign_file(content="html")),
    restarted("unreadable_shard", faults.unreadable_file()),
    restarted("cut_config", faults.cut_json()),
    restarted("missing_tokenizer", faults.missing_file()),
    restarted("hub_cache_without_weights", faults.broken_hub_cache()),
)
NAMES = (
    restarted("renamed_tensor", faults.rename_tensor(DOWN)),
    restarted("renamed_prefix", faults.rename_prefix()),
    restarted("added_bias", faults.add_bias(QUERY)),
)
# Right headers over wrong values: no file shows it, except to who reads all values or knows their digests.
VALUES = (
    restarted("flipped_bit", faults.flip_bit(DOWN), noticed_by="canary"),
    restarted("values_not_finite", faults.nonfinite_values(DOWN)),
    restarted("swapped_tensors", faults.swap_tensors(OUT, OTHER_OUT), noticed_by="canary"),
    restarted("shard_of_previous_step", faults.previous_shard(), noticed_by="canary", shards=2),
)
LEFT_OVER = (
    restarted("leftover_shards", faults.leftover_shards()),
    restarted("leftover_consolidated", faults.leftover_consolidated()),
    restarted("nested_checkpoint", faults.nested_checkpoint()),
    restarted("new_weights_as_bin", faults.new_weights_as_bin()),
    restarted("stale_numpy_cache", faults.stale_numpy_cache(), faults.launch_argument("--load-format", "npcache")),
    restarted(
        "state_for_two_ranks",
        faults.presharded_state(),
        faults.launch_argument("--load-format", "sharded_state"),
    ),
)
SIDE_FILES = (
    restarted("added_quantisation", faults.added_config(changes={"quantization_config": {"quant_method": "fp8"}})),
    restarted("removed_config_key", faults.removed_config("num_key_value_heads")),
    restarted("token_beyond_rows", faults.token_beyond_rows()),
    restarted("permuted_tokenizer", faults.permuted_tokenizer(), noticed_by="harmless"),
    restarted("changed_chat_template", faults.changed_chat_template(), noticed_by="harmless", has_chat_template=True),
    restarted("missing_chat_template", faults.missing_chat_template(), noticed_by="harmless", has_chat_template=True),
    restarted("generation_defaults", faults.generation_defaults(), noticed_by="harmless"),
)
LAUNCH = (
    restarted("context_beyond_config", faults.context_length()),
    restarted("ranks_that_do_not_divide_heads", faults.parallel_size(3)),
    restarted(
        "unknown_environment", faults.launch_environment("VLLM_DISABLE_WEIGHT_CACHE", "1"), noticed_by="harmless"
    ),
    restarted("anonymous_weights", faults.anonymous_weights(), noticed_by="harmless"),
)
PUBLISHED = (
    # The old engine has read its files, and all of the new ones are there when the new engine starts.
    restarted("overwritten_in_place", faults.overwrite_in_place(), noticed_by="harmless"),
    # Headers are right from the first block on: only answers show it.
    restarted("rsync_in_place", faults.rsync_in_place(duration_s=150.0), noticed_by="canary"),
)
# Further rows of the fault list, by faults that other scenarios use as well.
OTHER_ROWS = (
    restarted("missing_part_of_fused_tensor", faults.drop_tensor(KEY)),
    restarted("missing_norm", faults.drop_tensor(NORM)),
    restarted("missing_head", faults.drop_tensor("lm_head.weight")),
    restarted("widened_in_whole_dimension", faults.widen_tensor(OUT, dim=0, by=32)),
    restarted("widened_embedding", faults.widen_tensor("model.embed_tokens.weight", dim=0, by=64)),
    restarted("config_of_larger_vocabulary", faults.mismatched_config(changes={"vocab_size": 640})),
    # Later releases use the head and are right, so it is a risk to pre-flight.
    restarted(
        "config_ties_embeddings", faults.mismatched_config(changes={"tie_word_embeddings": True}), noticed_by="canary"
    ),
    restarted("config_of_other_rope", faults.mismatched_config(changes={"rope_theta": 500.0}), noticed_by="canary"),
    restarted(
        "unknown_architecture", faults.mismatched_config(changes={"architectures": ["NeverReleasedForCausalLM"]})
    ),
    restarted("config_of_other_dtype", faults.mismatched_config(changes={"torch_dtype": "float16"})),
    restarted("cut_weight_index", faults.cut_json("model.safetensors.index.json"), shards=2),
)
# No file shows what the host forbids, or what lies beside the checkpoint: the engine is the first to notice.
REFUSED = tuple(
    replace(scenario, unguarded=(claims.detected_by("startup"), claims.recovered(within_s=180.0)))
    for scenario in (
        restarted("forbidden_socket", faults.forbidden_socket(), noticed_by="startup"),
        restarted("mismatched_draft", faults.mismatched_draft(), noticed_by="startup"),
    )
)
CATALOGUE = (*FILES, *NAMES, *VALUES, *LEFT_OVER, *SIDE_FILES, *LAUNCH, *PUBLISHED, *OTHER_ROWS)


@pytest.mark.parametrize(
    "scenario",
    qualifying(
        CATALOGUE,
        "damaged_header_on_restart",
        "cut_config_on_restart",
        "flipped_bit_on_restart",
        "added_quantisation_on_restart",
    ),
)
def test_nobody_is_served_from_what_the_catalogue_damages(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()


@pytest.mark.parametrize("scenario", REFUSED, ids=lambda scenario: scenario.name)
def test_an_engine_that_cannot_be_launched_so_refuses_to_start(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()


def test_an_engine_on_a_held_port_is_not_taken_for_the_holder(rollout_run, run_scenario) -> None:
    if rollout_run.identity.kind == "container":
        pytest.skip("an engine in a container has ports of its own: nobody else can hold one")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        held = restarted("held_port", faults.held_port(holder.getsockname()[1]))
        noticed = (claims.detected_by("startup"), claims.recovered(within_s=180.0))
        run_scenario(replace(held, unguarded=noticed, guarded=contained("startup"))).require_held()
