"""An old server that was not stopped, and a new one that is told to use its port. Source: taxonomy row L05."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from harness.engine.engine import EngineIdentity
from harness.engine.launch import Launch
from harness.engine.ready import HEALTHY, probe_health
from harness.errors import EnvironmentMissing, FaultNotApplicable
from harness.faults.fault import Injected, parameters_of

PROBE_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PortOfOldServer:
    """A new engine on the port of the one that serves: whoever asks it for its health is answered by the old one."""

    name: ClassVar[str] = "port_of_old_server"
    fault_id: ClassVar[str] = "L05"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def require(self, identity: EngineIdentity) -> None:
        """Return for engines that share the host's network.

        Raises: EnvironmentMissing.
        """
        if identity.kind == "container":
            raise EnvironmentMissing("host network", "each container has ports of its own: two engines never share one")

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        port = urlsplit(launch.beside).port
        if port is None:
            raise FaultNotApplicable("no engine serves whose port could be used")
        altered = replace(launch, port=port)
        answer = probe_health(launch.beside, limit_s=PROBE_LIMIT_S)
        return altered, Injected.of(
            self,
            proved=altered.port == port != launch.port and answer == HEALTHY,
            because=f"the new engine is launched on port {altered.port}, where the old one answers /health with {answer}",
            before={"port": launch.port},
            after={"port": altered.port, "health": answer},
        )


def port_of_old_server() -> PortOfOldServer:
    """Launch on the port of the engine that serves and is not stopped; for a blue-green rollout.

    For engines that share the host's network: vLLM as a child process, the reference engine. Source: taxonomy row L05.
    """
    return PortOfOldServer()
