"""In-place reuse: the last reader of an argument may write over it, and which one is last depends on the order."""

from torch import Tensor

from roamc.graph.memory import build_memory
from roamc.rewriting.in_place import all_reuses, due
from tests.rewriting.cases import chain


def test_only_the_last_reader_writes_over_its_argument() -> None:
    def function(x: Tensor) -> Tensor:
        sine = x.sin()
        return sine.exp() @ sine.cos()

    memory = build_memory(chain(function, "")[0])
    number = {op.node.name: index for index, op in enumerate(memory.operators)}
    name = {storage.index: storage.name for storage in memory.storages}

    def written_over(*order: str) -> dict[str, str]:
        chosen = due(memory, [number[each] for each in order], all_reuses(memory))
        return {name[one.result]: name[one.reused] for one in chosen}

    assert written_over("sin", "exp", "cos", "mm") == {"cos": "sin"}
    assert written_over("sin", "cos", "exp", "mm") == {"exp": "sin"}
