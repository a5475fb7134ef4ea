"""Load on an engine: planned from a seed, sent by child processes, one record per arrival.

Importing this package imports neither locust nor gevent.
"""

from __future__ import annotations

from harness.load.shape import constant, gamma, poisson, ramp, spike, steady, trace

__all__ = ["constant", "gamma", "poisson", "ramp", "spike", "steady", "trace"]
