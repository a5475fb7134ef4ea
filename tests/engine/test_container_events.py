"""What Docker says about a run's containers reaches the harness, and nothing about other containers does."""

from __future__ import annotations

import pytest

from harness.clock import poll_until
from harness.engine.container_events import container_events
from harness.engine.container_options import INCARNATION_LABEL
from harness.engine.docker_daemon import connect
from harness.engine.image import ensure_image
from harness.label import LABEL_KEY, new_label

LIMIT_S = 60.0


@pytest.mark.docker
def test_events_of_this_run_are_handed_on_with_exit_code_and_others_are_not() -> None:
    label, other = str(new_label()), str(new_label())
    seen: list[tuple[str, str, dict[str, str]]] = []
    client = connect()
    containers = []
    try:
        with container_events(label, lambda name, action, attributes: seen.append((name, action, dict(attributes)))):
            for run, name in ((other, "stranger-1"), (label, "old-1")):
                labels = {LABEL_KEY: run, INCARNATION_LABEL: name}
                entry = {"entrypoint": ["sh", "-c", "exit 7"], "labels": labels, "network_mode": "none"}
                containers.append(client.containers.run(ensure_image().name, detach=True, **entry))
            poll_until(
                lambda: next((True for _, action, _ in seen if action == "die"), None),
                what="end of the container told",
                limit_s=LIMIT_S,
            )
    finally:
        for container in containers:
            container.remove(force=True)
        client.close()
    assert {name for name, _, _ in seen} == {"old-1"}
    own = str(containers[1].id)[:12]
    assert ("old-1", "die", {"exitCode": "7", "container": own}) in seen
