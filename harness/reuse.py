"""Takes a reloaded engine back to the old checkpoint, so that one start serves several reloads that are only recorded.

Only an engine that says that it took the reload comes into question, and only one whose every canary, the long prompt among
them, is then that of a cold start on the old checkpoint is used again. What was refused or died has a start of its own.
"""

from __future__ import annotations

from pathlib import Path

from harness.engine.dev_api import DevApi
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME
from harness.errors import HarnessError
from harness.faults.fault import PublishFault
from harness.ground import LIVE, Ground
from harness.guards import publish
from harness.guards.canary import Answer
from harness.guards.canary_pass import ask, check_deep, check_stream
from harness.guards.engine_api import EngineApi

CALL_LIMIT_S = 60.0


def can_share(ground: Ground) -> bool:
    """Say whether a scenario's engine may read where other scenarios publish."""
    scenario = ground.scenario
    if scenario.adapts:  # where an adapter was loaded from before decides what is stale in the prefix cache
        return False
    return scenario.reloads and not any(isinstance(fault, PublishFault) for fault in scenario.faults)


def take_back(engine: Engine, ground: Ground, root: Path) -> bool:
    """Publish the old checkpoint, let the engine reload it, and say whether it then is as after a start on it."""
    api = DevApi(url=engine.endpoint, api_key=ground.api_key, limit_s=CALL_LIMIT_S)
    try:
        publish.publish(ground.old, root, name=LIVE)
        calls = (api.pause(), api.reload_weights(), api.reset_prefix_cache(), api.resume())
        return all(reply.is_ok for reply in calls) and serves_old(api, ground)
    except (HarnessError, OSError, ValueError):
        return False


def serves_old(api: EngineApi, ground: Ground) -> bool:
    """Ask everything that the golden of the old checkpoint knows.

    Raises: OSError, ValueError for an engine that gives no usable answer.
    """
    golden = ground.goldens.old
    rows = ask(api, SERVED_MODEL_NAME, golden.prompts, rotation=None).rows
    if ground.goldens.compare(rows).answer is not Answer.OLD or check_stream(api, SERVED_MODEL_NAME, golden).because:
        return False
    return golden.deep is None or not check_deep(api, SERVED_MODEL_NAME, golden.deep).because
