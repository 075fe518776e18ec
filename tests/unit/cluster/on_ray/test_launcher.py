"""Where Ray is asked to place the ranks of a worker; without Ray."""

from __future__ import annotations

import pytest

from disagg.cluster.on_ray.launcher import Bundle, stage_bundles


@pytest.mark.parametrize(
    ("share", "num_ranks", "num_stages", "bundles"),
    [
        ({"disagg_slot": 1}, 1, 1, [{"disagg_slot": 1}]),
        ({"GPU": 1}, 8, 1, [{"GPU": 8}]),
        ({"GPU": 1}, 3, 3, [{"GPU": 1}, {"GPU": 1}, {"GPU": 1}]),
        ({"disagg_slot": 1, "node:h": 0.001}, 4, 2, [{"disagg_slot": 2, "node:h": 0.002}] * 2),
    ],
)
def test_the_ranks_of_a_stage_are_one_bundle_which_one_node_has(
    share: Bundle, num_ranks: int, num_stages: int, bundles: list[Bundle]
) -> None:
    assert stage_bundles(share, num_ranks, num_stages) == bundles
