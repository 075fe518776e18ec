"""Links whose true times are known, seen through noise and hiccups."""

from __future__ import annotations

import gc
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.ids import WorkerId
from disagg.router.workers.cost_model import LinkModel
from disagg.step_times.least_squares import total

P, D, E = WorkerId("p"), WorkerId("d"), WorkerId("e")


class TestLinkModel:
    @staticmethod
    def feed(links: LinkModel, decode_id: WorkerId, latency: float, per_mb: float, count: int, seed: int = 1) -> None:
        draw = random.Random(seed)
        for _ in range(count):
            kv_bytes = draw.randint(0, 20_000_000)
            noise = max(0.2, draw.gauss(1.0, 0.2))
            links.observe(P, decode_id, kv_bytes, (latency + kv_bytes / 1e6 * per_mb) * noise)
            assert links.exposed_ms(P, decode_id, kv_bytes) > 0.0  # A router reads between hand-overs.

    def test_something_is_assumed_of_a_link_that_nobody_used(self) -> None:
        assert LinkModel().exposed_ms(P, D, 0) == pytest.approx(1.0)
        assert LinkModel().exposed_ms(P, D, 10_000_000) == pytest.approx(6.0)

    def test_latency_and_bandwidth_of_a_pair(self) -> None:
        links = LinkModel()
        self.feed(links, D, 3.0, 1.2, 500)
        assert links.exposed_ms(P, D, 0) == pytest.approx(3.0, rel=0.25)
        assert links.exposed_ms(P, D, 10_000_000) == pytest.approx(15.0, rel=0.1)

    def test_a_new_pair_is_taken_for_a_typical_one_and_soon_for_itself(self) -> None:
        links = LinkModel()
        self.feed(links, D, 3.0, 1.2, 500)
        assert links.exposed_ms(P, E, 10_000_000) == links.exposed_ms(D, E, 10_000_000)
        new = links.exposed_ms(P, E, 10_000_000)
        assert new == pytest.approx(15.0, rel=0.1)
        self.feed(links, E, 12.0, 4.8, 2)
        after_two = links.exposed_ms(P, E, 10_000_000)
        self.feed(links, E, 12.0, 4.8, 100)
        after_many = links.exposed_ms(P, E, 10_000_000)
        assert new < after_two < after_many
        assert after_many == pytest.approx(60.0, rel=0.12)
        assert links.exposed_ms(P, D, 10_000_000) == pytest.approx(15.0, rel=0.1)

    @pytest.mark.parametrize("per_mb", [1.2, 0.0])
    def test_the_fit_of_a_pair_is_that_of_its_moments_with_a_typical_prior(self, per_mb: float) -> None:
        links = LinkModel()
        self.feed(links, D, 3.0, per_mb, 40)
        for count in range(15):  # Each of these is followed by a fit.
            links.observe(P, E, 5_000_000 * (count % 3), 12.0 + count % 5)
            expected = total(2, (links._typical(), links._pairs[P][E].recent)).solve()
            links.exposed_ms(P, E, 0)
            assert list(links._pairs[P][E].multiples) == expected

    def test_a_transfer_that_is_all_hidden_is_fine_and_never_free(self) -> None:
        links = LinkModel()
        for kv_bytes in range(0, 20_000_000, 100_000):
            links.observe(P, D, kv_bytes, 0.0)
        assert 0.0 < links.exposed_ms(P, D, 0) < 0.1
        assert links.exposed_ms(P, D, 0) <= links.exposed_ms(P, D, 10_000_000) < 0.2

    def test_one_hand_over_that_waited_moves_little(self) -> None:
        links = LinkModel()
        self.feed(links, D, 3.0, 1.2, 500)
        before = links.exposed_ms(P, D, 10_000_000)
        links.observe(P, D, 10_000_000, 5_000.0)
        self.feed(links, D, 3.0, 1.2, 20, seed=2)
        assert links.exposed_ms(P, D, 10_000_000) == pytest.approx(before, rel=0.15)

    def test_a_view_changes_no_later_prediction(self) -> None:
        """A fit that is due at a view is made where the next placement makes it."""
        untouched, viewed, read = LinkModel(), LinkModel(), LinkModel()
        for count in range(60):
            kv_bytes, exposed_ms = 1_000_000 * (count % 7), 5.0 + count % 11
            for links in (untouched, viewed, read):
                links.observe(P, D, kv_bytes, exposed_ms)
            viewed.known_ms(P, D, 1000)
            read.exposed_ms(P, D, 1000)
            if count % 5 == 4:
                now = untouched.exposed_ms(P, D, 1000)
                assert viewed.exposed_ms(P, D, 1000) == now
                assert viewed.known_ms(P, D, 1000) == pytest.approx(now, rel=1e-12)
        assert read.exposed_ms(P, D, 1000) != untouched.exposed_ms(P, D, 1000)

    def test_times_that_cannot_be_are_left_out(self) -> None:
        links = LinkModel()
        for exposed_ms in (-1.0, math.nan, math.inf):
            links.observe(P, D, 1000, exposed_ms)
        assert links.exposed_ms(P, D, 1000) == LinkModel().exposed_ms(P, D, 1000)

    @pytest.mark.parametrize("gone", [P, D])
    def test_a_worker_that_is_gone_takes_its_pairs_along(self, gone: WorkerId) -> None:
        links = LinkModel()
        self.feed(links, E, 3.0, 1.2, 500)
        self.feed(links, D, 12.0, 4.8, 100)
        typical, own = links.exposed_ms(E, E, 10_000_000), links.exposed_ms(P, D, 10_000_000)
        links.forget(gone)
        assert links.exposed_ms(P, D, 10_000_000) == typical != own

    def test_the_garbage_collector_walks_through_no_pair(self) -> None:
        links = LinkModel()
        self.feed(links, D, 3.0, 1.2, 100)
        assert links.exposed_ms(P, D, 1000) > 0.0
        gc.collect()  # the first one finds out that a tuple has numbers only
        link = links._pairs[P][D]
        parts = [link, link.multiples, link.outliers, link.recent, link.recent.gram, link.recent.moment]
        assert not any(map(gc.is_tracked, [links._pairs[P], *parts]))

    @given(
        st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.0, 1e6)), max_size=40),
        st.integers(0, 10**9),
        st.integers(0, 10**9),
    )
    def test_predictions_are_positive_and_grow_with_the_bytes(
        self, seen: list[tuple[int, float]], kv_bytes: int, more: int
    ) -> None:
        links = LinkModel()
        for size, exposed_ms in seen:
            links.observe(P, D, size, exposed_ms)
        for decode_id in (D, E):
            smaller = links.exposed_ms(P, decode_id, kv_bytes)
            assert 0.0 < smaller <= links.exposed_ms(P, decode_id, kv_bytes + more) < math.inf


class TestSlowLinks:
    """A link that was slow is tried again, though nobody would choose it."""

    BYTES = 10_000_000

    def slow(self) -> tuple[LinkModel, float]:
        """A link that took 15 ms for these bytes, and then 600 until 100 s; and the time that is predicted then."""
        links = LinkModel()
        for number in range(200):
            links.observe(P, D, self.BYTES, 15.0, number / 10)
            links.exposed_ms(P, D, self.BYTES)
        for number in range(800):
            links.observe(P, D, self.BYTES, 600.0, 20 + number / 10)
            links.exposed_ms(P, D, self.BYTES)
        return links, links.exposed_ms(P, D, self.BYTES, 100.0)

    @staticmethod
    def place_elsewhere(links: LinkModel, number: int, now: float) -> None:
        for _ in range(number):
            assert not links.placed(None, D, now)

    def test_it_counts_as_at_its_best_for_one_request(self) -> None:
        links, slow_ms = self.slow()
        assert slow_ms > 200.0
        self.place_elsewhere(links, 20, 103.0)
        assert links.exposed_ms(P, D, self.BYTES, 103.0) == slow_ms, "too soon"
        assert links.exposed_ms(P, D, self.BYTES, 107.0) == pytest.approx(15.0, rel=0.3)
        assert links.placed(P, D, 107.0)
        assert links.exposed_ms(P, D, self.BYTES, 107.0) == slow_ms, "one is enough"

    def test_it_is_not_tried_by_every_one_of_few_requests(self) -> None:
        links, slow_ms = self.slow()
        self.place_elsewhere(links, 5, 200.0)
        assert links.exposed_ms(P, D, self.BYTES, 200.0) == slow_ms

    def test_a_quick_trial_is_believed_and_a_slow_one_changes_nothing(self) -> None:
        links, slow_ms = self.slow()
        for now, exposed_ms, expected_ms in ((110.0, 600.0, slow_ms), (120.0, 15.0, 15.0)):
            self.place_elsewhere(links, 20, now)
            assert links.placed(P, D, now)
            links.observe(P, D, self.BYTES, exposed_ms, now + 1)
            assert links.exposed_ms(P, D, self.BYTES, now + 1) == pytest.approx(expected_ms, rel=0.4)

    def test_a_link_that_is_as_ever_is_never_tried(self) -> None:
        links = LinkModel()
        for number in range(200):
            links.observe(P, D, self.BYTES, 15.0 + number % 5, number / 10)
            links.exposed_ms(P, D, self.BYTES)
        self.place_elsewhere(links, 50, 100.0)
        assert not links.placed(P, D, 100.0)
