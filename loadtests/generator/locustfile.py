"""The file that Locust is given: `locust -f loadtests/generator/locustfile.py`, or `disagg load run`.

Locust has patched the standard library for gevent before it reads this. gRPC must be told before the first channel is
made, so that it comes first; the rest is in locust_user.py.
"""

from __future__ import annotations

from disagg.loadtests.generator.locust_gevent import init_grpc

init_grpc()

from disagg.loadtests.generator.locust_user import OpenLoopUser, UntilTheEnd  # noqa: E402

__all__ = ("OpenLoopUser", "UntilTheEnd")
