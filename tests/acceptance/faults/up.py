"""`disagg up` as a user runs it, with a cluster secret that the benchmark has: so it can read what workers hold.

DISAGG_BENCH_SECRET=<64 hexadecimal digits> python -m tests.acceptance.faults.up up --config FILE ...
"""

from __future__ import annotations

import os

from disagg.cli.main import main
from disagg.cluster.control import plan
from disagg.connections.cluster_secret import ClusterSecret

SECRET_VARIABLE = "DISAGG_BENCH_SECRET"

if __name__ == "__main__":
    secret = ClusterSecret(bytes.fromhex(os.environ.pop(SECRET_VARIABLE)))
    plan.new_secret = lambda network: secret  # before a launcher imports it
    main()
