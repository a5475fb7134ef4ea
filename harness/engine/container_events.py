"""What Docker says happened to a run's containers, as it happens."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import docker

from harness.engine.container_options import INCARNATION_LABEL
from harness.engine.docker_daemon import connect
from harness.label import LABEL_KEY

ACTIONS = ("start", "die", "kill", "oom", "pause", "unpause", "destroy")
END_LIMIT_S = 5.0
OnContainerEvent = Callable[[str, str, Mapping[str, str]], None]  # incarnation, action, attributes


@contextmanager
def container_events(run_label: str, on_event: OnContainerEvent) -> Iterator[None]:
    """Hand on what happens to the containers of this run until the block ends; `on_event` is called on a thread.

    Raises: EnvironmentMissing when no Docker engine answers.
    """
    with contextlib.closing(connect()) as client:
        chosen = {"type": "container", "label": f"{LABEL_KEY}={run_label}", "event": list(ACTIONS)}
        stream = client.events(decode=True, filters=chosen)
        listener = threading.Thread(target=_listen, args=(stream, on_event), name="container events", daemon=True)
        listener.start()
        try:
            yield
        finally:
            stream.close()
            listener.join(END_LIMIT_S)


def _listen(stream: Any, on_event: OnContainerEvent) -> None:
    # A closed stream and a daemon that goes away both end the listening; what was seen stays.
    with contextlib.suppress(docker.errors.DockerException, OSError, ValueError):
        for event in stream:
            actor = event.get("Actor", {})
            attributes = actor.get("Attributes", {})
            kept = {name: attributes[name] for name in ("exitCode", "signal") if name in attributes}
            kept["container"] = str(actor.get("ID", ""))[:12]
            on_event(attributes.get(INCARNATION_LABEL, ""), event.get("Action", ""), kept)
