"""The file of an extent on disk: its name, its header, and how it is known to be ours. Pure.

    <key>-<parent>-<tenant tag>.kv      hexadecimal; `root` for the first extent of a chain, `none` without tenants

    magic, version    bytes    what
    store             16       hash of what the KV depends on: fingerprint, arithmetic, layout, ranks, and of the secret
    key, parent, tag  16+16+8  as in the name
    heads             2+2      the KV heads that the file has, [first, end)
    num_bytes         8        of the payload
    mac               16       of all of the header before it, and of the payload
    payload                    as `ModelRunner.gather` copies it

Names tell what a folder holds, so that no file is opened to find that out. The MAC (BLAKE2b) has a key that only the
processes of the cluster have: what somebody else put there, or another cluster left, is refused like what is damaged.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

import msgspec

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.plan import Buffer
from disagg.engine.tiers.extents import NO_PARENT, Extent
from disagg.proto.block_hash import HASH_BYTES
from disagg.proto.ids import BlockHash
from disagg.proto.messages import KvLayout

SUFFIX: Final = ".kv"
_MAGIC: Final = b"disaggKV"
_VERSION: Final = 1
_MAC_BYTES: Final = 16
_TAG_BYTES: Final = 8
_FIELDS: Final = struct.Struct("<8sI16s16s16s8sHHQ")
HEADER_BYTES: Final = _FIELDS.size + _MAC_BYTES


class ExtentFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What all files of one worker's folder have in common."""

    store: bytes
    """Names what the KV depends on, and the cluster: files of another one's secret are in another folder."""
    num_heads: int
    num_bytes: int
    """Bytes of a payload."""
    key: bytes
    """Key of the MACs."""

    def __repr__(self) -> str:
        return f"ExtentFormat({self.store.hex()})"

    def header(self, extent: Extent, payload: Buffer) -> bytes:
        """The header of a file with this payload, of `num_bytes` bytes."""
        fields = self._fields(extent)
        return fields + self._mac(fields, payload)

    def fault(self, extent: Extent, header: bytes, payload: Buffer) -> str:
        """What is wrong with the file of an extent, in a word or two; empty where it is good. The header has its
        length."""
        fields, mac = header[: _FIELDS.size], header[_FIELDS.size :]
        if fields[:8] != _MAGIC:
            return "no KV"
        if fields != self._fields(extent):
            return "another header"
        return "" if hmac.compare_digest(mac, self._mac(fields, payload)) else "another checksum"

    def _fields(self, extent: Extent) -> bytes:
        parent, tag = extent.parent.ljust(HASH_BYTES, b"\0"), extent.tag.ljust(_TAG_BYTES, b"\0")
        return _FIELDS.pack(_MAGIC, _VERSION, self.store, extent.key, parent, tag, 0, self.num_heads, self.num_bytes)

    def _mac(self, fields: bytes, payload: Buffer) -> bytes:
        mac = hashlib.blake2b(fields, key=self.key, digest_size=_MAC_BYTES)
        mac.update(memoryview(payload))
        return mac.digest()


def extent_format(computed: str, layout: KvLayout, tp: int, num_bytes: int, secret: ClusterSecret) -> ExtentFormat:
    """The format of a worker's files. `computed`: by which model, and by which arithmetic."""
    described = msgspec.msgpack.encode((computed, layout, tp))
    return ExtentFormat(
        store=hashlib.sha256(b"disagg kv tier\0" + described + secret.sign("disagg kv tier store")).digest()[:16],
        num_heads=layout.groups[0].num_heads,
        num_bytes=num_bytes,
        key=secret.sign("disagg kv tier"),
    )


def file_name(extent: Extent) -> str:
    """The name of the file of an extent."""
    parent, tag = extent.parent.hex() or "root", extent.tag.hex() or "none"
    return f"{extent.key.hex()}-{parent}-{tag}{SUFFIX}"


def extent_of(name: str) -> Extent | None:
    """The extent whose file has this name; None for any other name."""
    parts = name.removesuffix(SUFFIX).split("-")
    if not name.endswith(SUFFIX) or len(parts) != 3:
        return None
    try:
        key = bytes.fromhex(parts[0])
        parent = b"" if parts[1] == "root" else bytes.fromhex(parts[1])
        tag = b"" if parts[2] == "none" else bytes.fromhex(parts[2])
    except ValueError:
        return None
    extent = Extent(BlockHash(key), BlockHash(parent) if parent else NO_PARENT, tag)
    is_whole = len(key) == HASH_BYTES and len(parent) in (0, HASH_BYTES) and len(tag) <= _TAG_BYTES
    return extent if is_whole and file_name(extent) == name else None
