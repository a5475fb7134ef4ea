"""Load on an engine: planned from a seed, sent by a child process, one record per arrival.

Importing this package imports neither locust nor gevent.
"""

from __future__ import annotations

from harness.load.plan import steady

__all__ = ["steady"]
