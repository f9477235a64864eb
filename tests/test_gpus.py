"""The table of GPUs: memory as sold, profiles, names, and the margin."""

from __future__ import annotations

import pytest

from roamc.cost import load_profile
from roamc.errors import OptionError
from roamc.gpus import CONTEXT, GPUS, LIBRARIES, NCCL, gpu_of, margin

SOLD = {  # GB of memory and GB/s, from the vendor's page of each model
    "h100": (80, 3350), "h200": (141, 4800), "b200": (180, 7700), "a100-40": (40, 1555), "a100-80": (80, 2039),
    "l40s": (48, 864), "l4": (24, 300), "rtx3090": (24, 936), "rtx4090": (24, 1008), "rtx5090": (32, 1792),
}  # fmt: skip


@pytest.mark.parametrize("name", GPUS)
def test_capacity_is_a_bit_less_than_is_sold(name: str) -> None:
    memory, bandwidth = SOLD[name]
    gpu = GPUS[name]
    assert f"({memory} GB)" in gpu.title
    assert gpu.bandwidth == bandwidth * 1e9
    # CUDA reports GiB; what is sold as 48 GB has 48 GiB, some of which ECC takes
    assert 0.9 * memory * 2**30 < gpu.capacity < 1.07 * memory * 1e9


@pytest.mark.parametrize("name", GPUS)
def test_profile_has_the_same_shares_of_the_data_sheet(name: str) -> None:
    gpu = GPUS[name]
    profile, like = load_profile(profile=gpu.profile), load_profile(profile=gpu.like)
    row = GPUS["h100" if gpu.like == "h100" else "a100-80"]
    assert (profile.name, profile.device) == (gpu.profile, "cuda")
    for dtype, sheet in (("bfloat16", "bfloat16"), ("float32", "float32")):
        share = like.flops["matmul"][dtype] / row.flops[sheet]
        assert profile.flops["matmul"][dtype] == pytest.approx(share * gpu.flops[sheet])
    share = like.flops["convolution"]["float32"] / row.flops["tf32"]
    assert profile.flops["convolution"]["float32"] == pytest.approx(share * gpu.flops["tf32"])
    assert profile.bandwidth / gpu.bandwidth == pytest.approx(like.bandwidth / row.bandwidth)
    assert profile.peaks["bfloat16"] == pytest.approx(gpu.flops["bfloat16"])
    assert ("node" in profile.links) == (gpu.nvlink > 0)


def test_names_and_sizes() -> None:
    assert gpu_of("H100") is GPUS["h100"]
    assert gpu_of("40GB").capacity == gpu_of(40 * 10**9).capacity == 40 * 10**9
    for asked, message in (
        ("a100", "one of a100-40 and a100-80: say which"),
        ("h10", "unknown GPU 'h10'; did you mean 'h100'"),
        ("40", "is 40 B; did you mean '40GB'"),
        ("lots", "GPUs: h100, h200"),
    ):
        with pytest.raises(OptionError, match=message):
            gpu_of(asked)


def test_margin_adds_its_parts_up() -> None:
    assert sum(margin(10**9, 0, 0).values()) == CONTEXT + LIBRARIES + 20_000_000
    assert sum(margin(10**9, 10**8, 0).values()) == CONTEXT + LIBRARIES + 22_000_000
    assert sum(margin(0, 0, 2).values()) == CONTEXT + LIBRARIES + 2 * NCCL
