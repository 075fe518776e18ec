"""Which machines a node provider has given to a Ray cluster: a plain value, changed by making a new one.

    a head is created     begin()   a new generation: what an earlier cluster of the same name left is forgotten
    a node is created     add()     on a free host of its type
    its state changes     tag()
    a node is terminated  remove()  its host is free again

Kept in a file by `cluster/on_ray/nodes/provider.py`. The machine that runs `ray up` and the head each have such a
table: the first one has the head, the second one has all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was created and not terminated."""

    host: str
    tags: dict[str, str]
    """Ray's tags: kind, type, and state of the set-up."""


class NodeTable(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes of one cluster."""

    generation: str = ""
    """Name of the generation, which changes with every head; empty before the first one."""
    num_created: int = 0
    nodes: dict[str, Node] = {}
    ended_hosts: tuple[str, ...] = ()
    """Hosts whose nodes of this generation were terminated, without a new one since."""

    def begin(self, generation: str) -> NodeTable:
        """An empty table for a new head."""
        return NodeTable(generation=generation)

    def add(self, node_type: str, host: str, tags: Mapping[str, str]) -> tuple[NodeTable, str]:
        """A table with one more node, and the node's id, which no other node of this generation has had."""
        number = self.num_created + 1
        node_id = make_node_id(node_type, number, host)
        return self.put(node_id, Node(host=host, tags=dict(tags)), num_created=number), node_id

    def put(self, node_id: str, node: Node, *, num_created: int | None = None) -> NodeTable:
        """A table with this node under this id."""
        ended = tuple(host for host in self.ended_hosts if host != node.host)
        count = self.num_created if num_created is None else num_created
        return msgspec.structs.replace(self, nodes={**self.nodes, node_id: node}, num_created=count, ended_hosts=ended)

    def tag(self, node_id: str, tags: Mapping[str, str]) -> NodeTable:
        """A table with a node's tags updated; unchanged if the node is gone (Ray tags nodes while they are
        terminated)."""
        node = self.nodes.get(node_id)
        if node is None:
            return self
        updated = Node(host=node.host, tags={**node.tags, **tags})
        return msgspec.structs.replace(self, nodes={**self.nodes, node_id: updated})

    def remove(self, *node_ids: str) -> NodeTable:
        """A table without these nodes, listed or not; their hosts count as ended."""
        nodes = {other: node for other, node in self.nodes.items() if other not in node_ids}
        ended = dict.fromkeys((*self.ended_hosts, *map(host_of, node_ids)))
        return msgspec.structs.replace(self, nodes=nodes, ended_hosts=tuple(ended))

    def matching(self, tags: Mapping[str, str]) -> list[str]:
        """The nodes that have all of these tags, in the order of their creation."""
        return [node_id for node_id, node in self.nodes.items() if tags.items() <= node.tags.items()]

    def free(self, hosts: Sequence[str]) -> list[str]:
        """Those of these hosts that have no node."""
        taken = {node.host for node in self.nodes.values()}
        return [host for host in hosts if host not in taken]


def make_node_id(node_type: str, number: int, host: str) -> str:
    """Make a node's id, such as `decode-3@10.0.0.7`: also a name for people, and a word for a shell."""
    return f"{node_type}-{number}@{host}"


def host_of(node_id: str) -> str:
    """The host in a node's id."""
    return node_id.rpartition("@")[2]
