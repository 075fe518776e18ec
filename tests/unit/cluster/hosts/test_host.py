"""What a process of a cluster says of its start."""

from __future__ import annotations

import pytest

from disagg.cluster.hosts.host import first_phases


@pytest.mark.parametrize(
    ("ordered_s", "loaded_s", "began_s", "expected"),
    [
        (10.0, 13.0, 13.5, {"template": 3.0, "launch": 0.5, "code": 1.5}),
        (10.0, 8.0, 10.25, {"template": 0.0, "launch": 0.25, "code": 4.75}),
        (10.0, 0.0, 10.5, {"launch": 0.5, "code": 4.5}),
        (10.0, 0.0, 9.99, {"launch": 0.0, "code": 5.01}),  # its age is known to a hundredth of a second only
        (None, 0.0, 10.5, {"code": 4.5}),
    ],
)
def test_the_time_until_our_code_runs_is_the_template_s_the_launch_s_or_the_code_s(
    ordered_s: float | None, loaded_s: float, began_s: float, expected: dict[str, float]
) -> None:
    phases = first_phases(ordered_s, loaded_s, began_s, 15.0)
    assert {phase.name: pytest.approx(phase.seconds) for phase in phases} == expected
