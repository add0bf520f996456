from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.engine.block_hash import (
    BlockHasher,
    CacheFingerprint,
    ExtraKind,
    encode_extra,
    salt_extra,
)

FACTS = {"format": 1, "model": {"layers": 30, "rope_theta": 10000.0, "name": "μ"}, "formats": ["int4", "fp32"]}
GOLDEN = {
    "fingerprint": "e58b560422806411b58918ce1412c506724a6e4d6ed267076e82d6069552d704",
    "root": "1f4565fb69b1ecd75f2366301e3e7446",
    "first": "43213d72f1bab0a4c93e9a60f81fed2b",
    "second": "50afd41ac5b34436327606c5427ab070",
}
PROGRAM = f"""
from chatkv.engine.block_hash import BlockHasher, CacheFingerprint, salt_extra
fingerprint = CacheFingerprint.from_facts({FACTS!r})
hasher = BlockHasher(bytes(range(32)), fingerprint)
first = hasher.block_hash(hasher.root_hash, range(16), salt_extra(b"salt"))
second = hasher.block_hash(first, range(16, 32))
print(fingerprint.digest.hex(), hasher.root_hash.hex(), first.hex(), second.hex())
"""
KEYS = st.lists(st.tuples(st.sampled_from(ExtraKind), st.binary(max_size=12)), max_size=4)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_b6_names_are_the_same_in_every_process(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == list(GOLDEN.values())


@given(KEYS, KEYS)
def test_c2_extra_keys_are_injective(left: list[tuple[ExtraKind, bytes]], right: list[tuple[ExtraKind, bytes]]) -> None:
    assert (encode_extra(left) == encode_extra(right)) == (left == right)


@given(st.binary(min_size=1, max_size=12))
def test_c2_a_salt_is_never_another_kind_of_key(payload: bytes) -> None:
    assert salt_extra(payload) != encode_extra([(ExtraKind.IMAGE, payload)])
    assert salt_extra(payload) != salt_extra(b"") == b""


def test_everything_that_names_a_block_changes_its_hash() -> None:
    fingerprint = CacheFingerprint.from_facts(FACTS)
    hasher = BlockHasher(b"key", fingerprint)
    ids = list(range(16))
    base = hasher.block_hash(hasher.root_hash, ids)
    other_parent = hasher.block_hash(base, ids)
    other_id = hasher.block_hash(hasher.root_hash, [*ids[:-1], 99])
    other_order = hasher.block_hash(hasher.root_hash, ids[::-1])
    other_salt = hasher.block_hash(hasher.root_hash, ids, salt_extra(b"s"))
    other_key = BlockHasher(b"other", fingerprint)
    other_model = BlockHasher(b"key", CacheFingerprint.from_facts({**FACTS, "format": 2}))
    names = [base, other_parent, other_id, other_order, other_salt]
    names += [other.block_hash(other.root_hash, ids) for other in (other_key, other_model)]
    assert len(set(names)) == len(names)


def test_only_full_blocks_have_a_name() -> None:
    hasher = BlockHasher(b"key", CacheFingerprint.from_facts(FACTS))
    with pytest.raises(AssertionError, match="full blocks"):
        hasher.block_hash(hasher.root_hash, range(15))


def test_c4_a_fingerprint_depends_on_facts_and_not_on_their_order() -> None:
    shuffled = {key: FACTS[key] for key in reversed(FACTS)}
    assert CacheFingerprint.from_facts(shuffled) == CacheFingerprint.from_facts(FACTS)
    changed = {**FACTS, "model": {"layers": 30, "rope_theta": 10000.5, "name": "μ"}}
    assert CacheFingerprint.from_facts(changed) != CacheFingerprint.from_facts(FACTS)


@pytest.mark.parametrize("facts", [{1: "a"}, {"a": [{2: 3}]}, {"a": b"bytes"}, {"a": {1, 2}}])
def test_facts_that_json_would_blur_are_refused(facts: dict) -> None:
    with pytest.raises(TypeError):
        CacheFingerprint.from_facts(facts)


def test_facts_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError):
        CacheFingerprint.from_facts({"a": float("nan")})
