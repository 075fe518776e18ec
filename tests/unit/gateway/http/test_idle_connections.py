"""Which connection gives its place to a new one."""

from __future__ import annotations

from disagg.gateway.http.idle_connections import SilentConnections


def test_strangers_go_first_and_in_each_group_the_longest_silent() -> None:
    silent: SilentConnections[str] = SilentConnections()
    for name, is_known in (("k1", True), ("s1", False), ("k2", True), ("s2", False)):
        silent.add(name, is_known=is_known)
    assert [silent.take() for _ in range(5)] == ["s1", "s2", "k1", "k2", None]


def test_a_request_begins_the_silence_anew() -> None:
    silent: SilentConnections[str] = SilentConnections()
    for name in ("a", "b", "c"):
        silent.add(name, is_known=False)
    silent.remove("a")
    silent.add("a", is_known=False)
    silent.remove("b")
    silent.remove("b")
    silent.add("c", is_known=True)  # it is in one group only
    assert len(silent) == 2
    assert [silent.take() for _ in range(3)] == ["a", "c", None]
