"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roamc.errors import OptionError
from roamc.units import LARGEST, format_apart, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1048576", 2**20),
        (1048576, 2**20),
        (0, 0),
        ("6GiB", 6 * 2**30),
        ("6 gib", 6 * 2**30),
        ("500MB", 500 * 10**6),
        ("500 MB", 500 * 10**6),
        ("1.5k", 1500),
        ("1.5KiB", 1536),
        ("2T", 2 * 10**12),
        ("2TiB", 2 * 2**40),
        ("80g", 80 * 10**9),
        ("  7 B ", 7),
        ("0.5GiB", 2**29),
    ],
)
def test_parse_reads(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "1e9",
        "6 Gb it",
        "6GiBs",
        "1,5GB",
        "nan",
        "inf",
        "0x10",
        ".",
        "1..5k",
        "٦GiB",
        "6KB".replace("K", "\N{KELVIN SIGN}"),
        "5 5",
        None,
        True,
        1.5e300,
    ],
)
def test_parse_refuses_and_says_how_to_write_it(text: object) -> None:
    with pytest.raises(OptionError, match=r"is not a size; write for example 6GiB") as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)


def test_parse_refuses_a_negative_number() -> None:
    with pytest.raises(OptionError, match="cannot be negative: -5"):
        parse_bytes(-5)


@pytest.mark.parametrize("size", [2**63, str(2**63), "8388608TiB", "9" * 400])
def test_size_that_no_plan_can_be_saved_with_is_refused(size: int | str) -> None:
    with pytest.raises(OptionError, match=f"^{size!r} is more than any memory has; write for example 6GiB"):
        parse_bytes(size)


@given(st.integers(0, LARGEST))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_whole_numbers_are_read_exactly(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == parse_bytes(f"{count} B") == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (463_200_000, "463.2 MB"),
        (80 * 10**9, "80 GB"),
        (1_234_567, "1.235 MB"),
        (5 * 10**12, "5 TB"),
        (12_345 * 10**12, "12345 TB"),
        (-2_000_000, "-2 MB"),
        (999_999, "1 MB"),
    ],
)
def test_format_writes_four_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 2**60))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_format_is_read_back_to_four_digits(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= count * 0.0006


def test_sizes_that_differ_are_written_apart() -> None:
    assert format_apart(80 * 10**9, 80 * 10**9) == ("80 GB", "80 GB")
    assert format_apart(80 * 10**9, 80 * 10**9 + 1) == ("80 GB", "80.000000001 GB")
    assert format_apart(79_999_999_999, 8 * 10**10) == ("79.999999999 GB", "80 GB")
    assert format_apart(1, 2) == ("1 B", "2 B")
