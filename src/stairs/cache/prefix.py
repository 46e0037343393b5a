"""Which blocks already hold the K/V of a prompt's beginning, and which of those are pinned.

A prefix is found block by block: the key of a block is SHA-256 over its parent's key and its own
tokens, and the root is keyed by typed extra values (the salt is the first), so equal tokens under
different salts never meet. A key is only an index: a hit also compares the tokens and the parent,
so even equal keys cannot serve one prompt's K/V to another.

    tokens   [ block 0 | block 1 | block 2 | tail )
    entries     e0   <-   e1   <-   e2                only full blocks, published once written
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stairs.cache.blocks import BlockPool
from stairs.errors import InvalidRequestError

__all__ = ["Entry", "Pin", "PrefixCache", "chain_key"]


def chain_key(parent_key: bytes, content: bytes) -> bytes:
    """Key of a block whose parent has ``parent_key`` and whose tokens (int32) are ``content``."""
    return hashlib.sha256(parent_key + content).digest()


@dataclass(slots=True, eq=False)
class Entry:
    """One published block. Compared by identity: a re-published parent is another entry."""

    key: bytes
    parent: Entry | None
    root: bytes
    tokens: bytes
    block: int


@dataclass(frozen=True, slots=True)
class Pin:
    """A named prefix whose blocks are held until it is unpinned.

    ``num_tokens`` is the length of the prefix, of which the first ``num_pinned_tokens`` (whole
    blocks) are held; the tail is recomputed by every request.
    """

    name: str
    tokens: tuple[int, ...]
    salt: str | None
    blocks: tuple[int, ...]
    num_pinned_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class PrefixCache:
    """Index from prefixes to blocks of ``pool``, and the table of pins."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        key_function: Callable[[bytes, bytes], bytes] = chain_key,
    ) -> None:
        self.block_size = block_size
        self.pins: dict[str, Pin] = {}
        self._pool = pool
        self._key = key_function
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        pool.on_evict = self._forget_block

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_pinned_blocks(self) -> int:
        return len({block for pin in self.pins.values() for block in pin.blocks})

    def match(self, tokens: Sequence[int], *, salt: str | None = None) -> list[Entry]:
        """Entries of the longest published prefix, at most ``len(tokens) - 1`` tokens of it.

        Each entry's block is acquired for the caller, at once: it cannot be evicted in between.
        """
        found: list[Entry] = []
        root = _root(salt)
        parent: Entry | None = None
        for i in range((len(tokens) - 1) // self.block_size):
            content = self._content(tokens, i)
            entry = self._by_key.get(self._key(parent.key if parent else root, content))
            if entry is None or not _is(entry, parent, root, content):
                break
            self._pool.acquire(entry.block)
            found.append(entry)
            parent = entry
        return found

    def publish(
        self,
        tokens: Sequence[int],
        index: int,
        block: int,
        *,
        parent: Entry | None,
        salt: str | None,
    ) -> Entry:
        """Make block ``index`` of ``tokens``, whose K/V now lie complete in ``block``, findable.

        Returns the entry to pass as the next block's ``parent``: the one already there if the
        same content was published before, then ``block`` stays the caller's private copy.
        """
        root = _root(salt)
        content = self._content(tokens, index)
        key = self._key(parent.key if parent else root, content)
        there = self._by_key.get(key)
        if there is not None:
            if _is(there, parent, root, content):
                return there
            # Its parent was evicted, or two contents share a key: the older one can't be kept.
            self._forget_block(there.block)
            self._pool.forget(there.block)
        entry = Entry(key, parent, root, content, block)
        self._by_key[key] = entry
        self._by_block[block] = entry
        self._pool.mark_hittable(block)
        return entry

    def pin(
        self, name: str, tokens: Sequence[int], blocks: Sequence[int], *, salt: str | None = None
    ) -> Pin:
        """Hold the K/V of the first ``len(blocks)`` blocks of ``tokens`` until ``unpin``.

        ``blocks`` are the caller's own, complete and held. Where another copy is already
        published that one is held instead, so that what is pinned is what a prompt will find.
        """
        assert name not in self.pins
        held: list[int] = []
        parent: Entry | None = None
        for i, block in enumerate(blocks):
            parent = self.publish(tokens, i, block, parent=parent, salt=salt)
            self._pool.acquire(parent.block)
            held.append(parent.block)
        pin = Pin(name, tuple(tokens), salt, tuple(held), len(held) * self.block_size)
        self.pins[name] = pin
        return pin

    def unpin(self, name: str) -> Pin:
        """Let the pin's blocks go; they stay cached until the pool needs them."""
        if name not in self.pins:
            raise InvalidRequestError(f"no pinned prefix is named {name!r}", param="name")
        pin = self.pins.pop(name)
        self._pool.release(reversed(pin.blocks))
        return pin

    def _content(self, tokens: Sequence[int], index: int) -> bytes:
        start = index * self.block_size
        return array("i", tokens[start : start + self.block_size]).tobytes()

    def _forget_block(self, block: int) -> None:
        entry = self._by_block.pop(block)
        del self._by_key[entry.key]


def _root(salt: str | None) -> bytes:
    # Typed and length-prefixed, so that no salt can imitate another kind of key or "no salt".
    if salt is None:
        return b"none"
    raw = salt.encode()
    return b"salt:%d:" % len(raw) + raw


def _is(entry: Entry, parent: Entry | None, root: bytes, content: bytes) -> bool:
    return entry.parent is parent and entry.root == root and entry.tokens == content
