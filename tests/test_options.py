"""Options: names, types and ranges are checked once, and every refusal says what would do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from roamc.errors import OptionError, ProfileError
from roamc.options import Options, parse_options


@pytest.mark.parametrize("options", [None, {}])
def test_nothing_given_is_the_defaults(options: dict[str, Any] | None) -> None:
    assert parse_options(options) == Options()


def test_every_default_is_accepted_when_given() -> None:
    assert parse_options(dataclasses.asdict(Options())) == Options()


def test_given_options_are_not_changed() -> None:
    options = {"memory_budget": "6GiB", "disable": "reorder"}
    parse_options(options)
    assert options == {"memory_budget": "6GiB", "disable": "reorder"}


@pytest.mark.parametrize(("size", "count"), [("6GiB", 6 * 2**30), ("500 MB", 5 * 10**8), (1024, 1024), (None, None)])
def test_memory_budget_is_read_as_a_size(size: object, count: int | None) -> None:
    assert parse_options({"memory_budget": size}).memory_budget == count


@pytest.mark.parametrize(
    ("disable", "names"),
    [
        ("reorder", ("reorder",)),
        ("reorder, normalize", ("reorder", "normalize")),
        (["reorder"], ("reorder",)),
        (("a", "b"), ("a", "b")),
        ("", ()),
        (" , ", ()),
        ([], ()),
        (None, ()),
    ],
)
def test_disable_takes_a_text_or_a_list_of_names(disable: object, names: tuple[str, ...]) -> None:
    assert parse_options({"disable": disable}).disable == names


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("memory_limt", "memory_budget"),
        ("memorylimit", "memory_budget"),
        ("Order", "order"),
        ("alignement", "alignment"),
    ],
)
def test_unknown_option_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(OptionError, match=f"unknown option '{name}'.*did you mean '{nearest}'") as caught:
        parse_options({name: 1})
    assert all(field.name in str(caught.value) for field in dataclasses.fields(Options))


@pytest.mark.parametrize("name", ["zzz", "verbose"])
def test_unknown_option_unlike_any_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(OptionError, match=rf"unknown option '{name}'\. Valid options: ") as caught:
        parse_options({name: 1})
    assert "did you mean" not in str(caught.value)
    assert "memory_budget" in str(caught.value)


def test_a_dict_of_options_as_one_option_is_told_to_be_keywords() -> None:
    with pytest.raises(OptionError, match="options are keyword arguments here: memory_budget='min' in place of"):
        parse_options({"options": {"memory_budget": "min"}})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("alignment", 3, "power of two, not 3"),
        ("alignment", -64, "power of two, not -64"),
        ("alignment", 2**30, "at most 2097152 bytes, not 1073741824"),
        ("alignment", 64.0, "power of two, not 64.0"),
        ("alignment", "64", "power of two, not '64'"),
        ("alignment", True, "power of two, not True"),
        ("layout_nodes", -1, "whole number from 0, not -1"),
        ("layout_nodes", 1.5, "whole number from 0, not 1.5"),
        ("max_plans", 0, "whole number from 1, not 0"),
        ("max_plans", None, "whole number from 1, not None"),
        ("strict", 1, "True or False, not 1"),
        ("strict", "no", "True or False, not 'no'"),
        ("idle_arena", "drop", "idle_arena must be one of keep, free, not 'drop'"),
        ("idle_arena", None, "not None"),
        ("order", None, "unknown order None"),
        ("order", "progrm", "did you mean 'program'"),
        ("idle_arena", "kep", "did you mean 'keep'"),
        ("order", ["best"], "unknown order \\['best'\\]"),
        ("disable", 1, "pass names, not 1"),
        ("disable", [1], "pass names, not \\[1\\]"),
        ("disable", {"reorder": True}, "pass names, not"),
        ("profile", 1, "shipped profile, not 1"),
        ("profile", "", "shipped profile, not ''"),
        ("memory_budget", "lots", "'lots' is not a size"),
        ("memory_budget", -1, "negative"),
        ("memory_budget", True, "True is not a size"),
    ],
)
def test_value_out_of_range_is_refused_by_name(name: str, value: object, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse_options({name: value})


def test_unknown_profile_is_refused_without_a_budget_too() -> None:
    with pytest.raises(ProfileError, match=r"'rtx2080' is neither a file nor a shipped profile \(a100, .*h100.*\)"):
        parse_options({"profile": "rtx2080"})
    assert parse_options({"profile": "h100"}).profile == "h100"


@pytest.mark.parametrize("budget", ["0%", "lots", "half; or less", "-5%", -5, True, "", "0.5", "Min", [1]])
def test_every_error_about_a_budget_says_what_one_is(budget: object) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options({"memory_budget": budget})
    what, _, advice = str(caught.value).rpartition("; ")
    assert what.startswith("memory_budget: ")
    assert str(budget) in what
    assert advice == (
        'give a size such as "6GiB", a share of what eager holds such as "80%", a share of time that may be added '
        'such as "+1%" or "+0%", a size in all such as "total:40GB", or "min", "light" or "device"'
    )


def test_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="unknown option"):
        parse_options({"x": 1})


def test_key_is_hashable_and_tells_options_apart() -> None:
    assert hash(Options().key()) == hash(Options().key())
    changed = [
        *({"memory_budget": 1}, {"alignment": 128}, {"layout_nodes": 5}, {"order": "program"}),
        *({"disable": ("reorder",)}, {"strict": True}, {"max_plans": 2}, {"idle_arena": "free"}),
        *({"profile": "cpu"}, {"codecs": ("name",)}, {"numerics": "fast"}),
        *({"shard": "sequence"}, {"async_tp": "on"}, {"tune": False}),
        *({"gpu": "h100"}, {"plan": ("plan.json",)}, {"cache": False}),
    ]
    keys = {Options(**one).key() for one in changed}
    assert len(keys | {Options().key()}) == len(changed) + 1
    assert {name for one in changed for name in one} == {field.name for field in dataclasses.fields(Options)}


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().order = "program"  # type: ignore[misc]


@pytest.mark.parametrize("options", ["min", 0.5, ["memory_budget"]])
def test_options_that_are_no_dict_are_refused(options: Any) -> None:
    with pytest.raises(OptionError, match="options must be a dict such as"):
        parse_options(options)


def test_plan_files_keep_their_place_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there = str(tmp_path / "one.json")
    for files in ("one.json", Path("one.json"), ["one.json"], [Path("one.json")]):
        assert parse_options({"plan": files}).plan == (there,)
    assert parse_options({"plan": Path("a,b.json")}).plan == (str(tmp_path / "a,b.json"),)
    assert parse_options({"plan": None}).plan == ()
