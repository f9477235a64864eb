"""What ranks compare before their first step."""

from __future__ import annotations

import torch

from roamc.runtime import agreement


def test_a_hash_leaves_the_tensor_to_whoever_frees_it() -> None:
    """``fully_shard`` frees what it has gathered by resizing its storage."""
    gathered = torch.arange(6.0)
    hashed = agreement._hash(gathered)
    gathered.untyped_storage().resize_(0)
    assert hashed == agreement._hash(torch.arange(6.0))
