"""Plain data of files: what is nested so deep that its readers would not come to an end is refused."""

from __future__ import annotations

import pytest

from roamc import decode
from roamc.errors import PlanError
from roamc.planning.plan import FORMAT, Plan


@pytest.mark.parametrize(("begin", "end"), ["[]", ('{"a":', "}"), ('[{"a":', "}]")])
@pytest.mark.parametrize("depth", [300, 600, 900, 100_000])
def test_lists_and_objects_in_one_another_are_refused(begin: str, end: str, depth: int) -> None:
    text = f'{{"format": {FORMAT}, "decisions": {begin * depth}1{end * depth}}}'
    with pytest.raises(PlanError, match=f"^not a plan: it has more than {decode.LEVELS} lists and objects in one "):
        Plan.from_json(text)


def test_as_many_levels_as_there_may_be_are_read() -> None:
    text = "[" * decode.LEVELS + "]" * decode.LEVELS
    assert str(decode.parse(text)) == text
    with pytest.raises(ValueError, match="it has more than"):
        decode.parse(f"[{text}]")
