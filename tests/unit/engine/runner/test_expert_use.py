"""How evenly tokens are divided among experts."""

from __future__ import annotations

import torch

from disagg.engine.runner.expert_use import STEPS_BETWEEN, ExpertUse


def note_steps(use: ExpertUse, num_steps: int) -> None:
    for _ in range(num_steps):
        use.note_step()


def test_the_busiest_expert_over_an_average_one_of_each_layer() -> None:
    """What the warm-up counted, before the first reading, does not count."""
    counts = torch.tensor([[9, 0, 0, 0], [9, 0, 0, 0], [9, 0, 0, 0]])
    use = ExpertUse(tuple(counts))
    note_steps(use, STEPS_BETWEEN)
    found = [use.imbalance]
    counts += torch.tensor([[4, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]])
    note_steps(use, STEPS_BETWEEN)
    assert [*found, use.imbalance] == [(), (4.0, 1.0, 1.0)]


def test_it_is_that_of_the_steps_between_two_readings() -> None:
    counts = torch.tensor([0, 0])
    use = ExpertUse((counts,))
    note_steps(use, STEPS_BETWEEN)
    counts += torch.tensor([1, 1])
    note_steps(use, STEPS_BETWEEN)
    assert use.imbalance == (1.0,)
    counts += torch.tensor([3, 1])
    note_steps(use, STEPS_BETWEEN - 1)
    assert use.imbalance == (1.0,)
    note_steps(use, 1)
    assert use.imbalance == (1.5,)


def test_a_model_without_experts_has_no_imbalance() -> None:
    use = ExpertUse(())
    use.note_step()
    assert use.imbalance == ()
