from __future__ import annotations

import pytest

from stairs.cache.blocks import BlockPool
from stairs.cache.prefix import Entry, Pin, PrefixCache, chain_key
from stairs.errors import InvalidRequestError

BLOCK = 4


def publish(cache: PrefixCache, pool: BlockPool, tokens: list[int], salt: str | None = None):
    """Blocks of a finished sequence with ``tokens``; returns its entries."""
    blocks = pool.allocate(len(tokens) // BLOCK)
    assert blocks is not None
    entries: list[Entry] = []
    for i, block in enumerate(blocks):
        parent = entries[-1] if entries else None
        entries.append(cache.publish(tokens, i, block, parent=parent, salt=salt))
    pool.release(reversed(blocks))
    return entries


def num_hit(cache: PrefixCache, pool: BlockPool, tokens: list[int], salt: str | None = None) -> int:
    found = cache.match(tokens, salt=salt)
    pool.release(entry.block for entry in reversed(found))
    return len(found) * BLOCK


def pin(cache: PrefixCache, pool: BlockPool, name: str, tokens: list[int]) -> Pin:
    """What the engine does when a prefix has been computed."""
    blocks = pool.allocate(len(tokens) // BLOCK)
    assert blocks is not None
    made = cache.pin(name, tokens, blocks)
    pool.release(reversed(blocks))
    return made


def fresh(key_function=chain_key, num_blocks: int = 32) -> tuple[PrefixCache, BlockPool]:
    pool = BlockPool(num_blocks)
    return PrefixCache(pool, BLOCK, key_function=key_function), pool


def test_only_full_blocks_and_never_the_last_token():
    cache, pool = fresh()
    tokens = list(range(12))
    publish(cache, pool, tokens)
    assert num_hit(cache, pool, tokens) == 8  # one token must be recomputed
    assert num_hit(cache, pool, [*tokens, 99]) == 12
    assert num_hit(cache, pool, tokens[:7]) == 4
    assert num_hit(cache, pool, [1, *tokens]) == 0
    assert pool.num_owned == 0


def test_same_tokens_after_different_beginnings_are_different():
    cache, pool = fresh()
    publish(cache, pool, [1, 1, 1, 1, 5, 5, 5, 5])
    assert num_hit(cache, pool, [2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0
    assert num_hit(cache, pool, [5, 5, 5, 5, 0]) == 0


def test_salt_separates_tenants():
    cache, pool = fresh()
    prompt = list(range(9))
    publish(cache, pool, prompt, salt="a")
    assert [num_hit(cache, pool, prompt, s) for s in ("a", "b", None, "")] == [8, 0, 0, 0]


@pytest.mark.parametrize("salt", ["none", "salt:1:a", "a"])
def test_no_salt_imitates_another_root(salt: str):
    cache, pool = fresh()
    prompt = list(range(9))
    publish(cache, pool, prompt)
    publish(cache, pool, prompt, salt="a")
    hit = 8 if salt == "a" else 0
    assert num_hit(cache, pool, prompt, salt) == hit


def test_equal_keys_never_serve_other_tokens():
    """S1, S2: a constant key finds an entry at every look-up; tokens and parents refuse it."""
    cache, pool = fresh(key_function=lambda parent, content: b"same")
    first = [1] * 4 + [2] * 4 + [0]
    publish(cache, pool, first)
    for other in ([3] * 4 + [4] * 4 + [0], [2] * 4 + [0], [2] * 4 + [2] * 4 + [0]):
        assert num_hit(cache, pool, other) == 0
    assert num_hit(cache, pool, first, "salt") == 0


def test_constant_parent_key_collision_in_the_middle():
    """Two prompts whose second blocks have one key and equal tokens but different first blocks."""
    cache, pool = fresh(key_function=lambda parent, content: content)
    a, b = [1] * 4 + [9] * 4 + [0], [2] * 4 + [9] * 4 + [0]
    publish(cache, pool, a)
    assert num_hit(cache, pool, b) == 0
    publish(cache, pool, b)  # takes the key over
    assert num_hit(cache, pool, b) == 8
    assert num_hit(cache, pool, a) == 4
    assert pool.num_free + pool.num_cached == 32 and pool.num_cached == 3


def test_a_hit_is_held_from_the_look_up_on():
    cache, pool = fresh(num_blocks=3)
    publish(cache, pool, [1] * 8)
    found = cache.match([1] * 8 + [2])
    assert [pool.ref_count(e.block) for e in found] == [1, 1]
    assert pool.allocate(2) is None
    pool.release(e.block for e in found)


def test_evicted_parent_hides_its_children_until_it_is_back():
    cache, pool = fresh(num_blocks=4)
    tokens = [1] * 4 + [2] * 4 + [0]
    entries = publish(cache, pool, tokens)
    pool.acquire(entries[1].block)  # someone holds the child only
    taken = pool.allocate(3)
    assert taken is not None  # evicts the parent
    assert num_hit(cache, pool, tokens) == 0
    pool.release(taken)
    pool.release([entries[1].block])
    publish(cache, pool, tokens)
    assert num_hit(cache, pool, tokens) == 8


def test_publishing_twice_keeps_the_first_copy():
    cache, pool = fresh()
    first = publish(cache, pool, [1] * 8)
    second = publish(cache, pool, [1] * 8)
    assert [e.block for e in first] == [e.block for e in second]
    assert pool.num_cached == 2 and len(cache) == 2


def test_a_pin_survives_a_full_pool_and_ends_with_unpin():
    cache, pool = fresh(num_blocks=6)
    tokens = list(range(8))
    pinned = pin(cache, pool, "system", [*tokens, 8])
    assert (pinned.num_tokens, pinned.num_pinned_tokens, cache.num_pinned_blocks) == (9, 8, 2)
    others = pool.allocate(4)
    assert others is not None and pool.allocate(1) is None
    assert num_hit(cache, pool, [*tokens, 9]) == 8
    pool.release(others)
    cache.unpin("system")
    assert num_hit(cache, pool, [*tokens, 9]) == 8  # still cached, no longer safe
    assert pool.allocate(6) is not None
    assert num_hit(cache, pool, [*tokens, 9]) == 0
    with pytest.raises(InvalidRequestError, match="no pinned prefix is named 'system'"):
        cache.unpin("system")


def test_pins_that_share_a_head_count_its_blocks_once():
    cache, pool = fresh()
    pin(cache, pool, "one", [1] * 4 + [2] * 4)
    pin(cache, pool, "two", [1] * 4 + [3] * 4)
    assert cache.num_pinned_blocks == 3
    cache.unpin("one")
    assert cache.num_pinned_blocks == 2 and pool.num_owned == 2


def test_pin_holds_the_copy_that_prompts_will_find():
    """The head was published by another request and is still cached; a twin of the tail too."""
    cache, pool = fresh(num_blocks=8)
    tokens = [1] * 4 + [2] * 4
    first = publish(cache, pool, tokens)
    pinned = pin(cache, pool, "system", tokens)
    assert list(pinned.blocks) == [e.block for e in first]
    assert pool.num_free == 6 and pool.num_owned == 2


def test_pin_publishes_again_what_was_evicted_meanwhile():
    cache, pool = fresh(num_blocks=5)
    tokens = [1] * 4 + [2] * 4
    publish(cache, pool, tokens)
    mine = pool.allocate(2)
    parent = cache.publish(tokens, 0, mine[0], parent=None, salt=None)  # finds the first copy
    assert parent.block != mine[0]
    others = pool.allocate(3)  # evicts the first copy, head and tail
    cache.pin("system", tokens, mine)
    pool.release([*others, *mine])
    assert num_hit(cache, pool, [*tokens, 0]) == 8
    assert pool.allocate(3) is not None and num_hit(cache, pool, [*tokens, 0]) == 8
