"""What no engine can be expected to see."""

from __future__ import annotations

from harness.judge.finding_texts.text import OPERATOR, Text

WELL_FORMED = "Nothing in the files contradicts the config, so no engine can know. A digest can, or known answers."

OPERATORS: tuple[Text, ...] = (
    Text(
        pattern=r"(transposed_tensor|swapped_tensors|flipped_bit|shard_of_previous_step|config_of_other_rope)_on_restart"
        r"|one_bit_of_the_second_rank",
        title="Well-formed files with other values",
        expected=WELL_FORMED,
        why="A canary with known answers, or a manifest, is the only guard.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r"(slow_)?preallocated_(shard|sync)_on_restart",
        title="A file that was preallocated and never filled",
        expected=f"{WELL_FORMED} Pre-flight sees the zeros.",
        why="The header came first, so the file looks whole.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r"(nested_(move|checkpoint)|stale_index|rsync_in_place|overwritten_in_place|anonymous_weights).*",
        title="The old checkpoint is still what the directory holds, in whole or in part",
        expected="The engine reads what the directory and its weight index name. Publish whole, by a rename, and pre-flight it.",
        why="Every sign says that the rollout went well.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r"port_held.*",
        title="The old server still holds the port",
        expected="The new one refuses to start, as it does. What asks the port has to ask which server answers, too.",
        why="Probes meet the old server and pass, so the rollout counts as done.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r".*overwritten_while_loading.*",
        title="A weight file is written over while it is loaded",
        expected="The engine maps the file it was given. Publish by a rename, never in place.",
        why="Parts of two checkpoints are served together, and the header was right when it was read.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r"stale_cache.*",
        title="A weight cache in shared memory outlives the checkpoint",
        expected="vLLM has no such cache: here it is a load-format plug-in that works as the incident's write-up describes.",
        why="Key such a cache by content, and purge it before a start.",
        whose=OPERATOR,
    ),
)
