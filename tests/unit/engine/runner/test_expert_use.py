"""How evenly tokens are divided among experts."""

from __future__ import annotations

import torch

from disagg.engine.runner.expert_use import STEPS_BETWEEN, ExpertUse


def test_the_busiest_expert_over_an_average_one_of_each_layer() -> None:
    counts = torch.tensor([[4, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]])
    use = ExpertUse(tuple(counts))
    found = [use.imbalance]
    use.note_step()
    assert [*found, use.imbalance] == [(), (4.0, 1.0, 1.0)]


def test_counters_are_read_now_and_then() -> None:
    counts = torch.tensor([1, 1])
    use = ExpertUse((counts,))
    use.note_step()
    counts[0] = 3
    for _ in range(STEPS_BETWEEN - 1):
        use.note_step()
    assert use.imbalance == (1.0,)
    use.note_step()
    assert use.imbalance == (1.5,)


def test_a_model_without_experts_has_no_imbalance() -> None:
    use = ExpertUse(())
    use.note_step()
    assert use.imbalance == ()
