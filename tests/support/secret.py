"""The cluster's secret in tests, and one of another cluster."""

from __future__ import annotations

from disagg.connections.cluster_secret import NUM_BYTES, ClusterSecret
from disagg.engine.kv_transfer.transport import Checksum

SECRET = ClusterSecret(bytes(range(NUM_BYTES)))
OTHER_SECRET = ClusterSecret(bytes(reversed(range(NUM_BYTES))))
checksum = Checksum.of_secret(SECRET)
"""What the workers of the cluster compute."""
