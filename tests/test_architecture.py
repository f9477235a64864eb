"""Who may import whom, read from the source: nothing of ours is imported, so a broken file hides no fault."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"roamc": "roamc", "passes": "roamc.passes", "solvers": "roamc.solvers"}

# Modules on the floor of roamc that stand on nothing but each other.
FLOOR = tuple(
    f"roamc.{name}"
    for name in (
        *(
            "budget",
            "compat",
            "compat_aot",
            "compat_autocast",
            "compat_calls",
            "compat_dtensor",
            "compat_dynamo",
            "compat_eager",
            "compat_fsdp",
            "compat_groups",
            "compat_hooks",
            "compat_lines",
            "compat_modules",
            "compat_onednn",
            "compat_operators",
            "compat_repeats",
            "decode",
            "errors",
            "exchange",
            "files",
        ),
        *("gpus", "interruptions", "locks", "settings", "ticker", "units", "version"),
    )
)
GROUND = (*FLOOR, "roamc.graph", "roamc.operators")  # what a step is, and what is known of operators
SETTINGS = ("roamc.options", "roamc.notices")
BELOW_PASSES = (*GROUND, "roamc.options", "roamc.cost", "roamc.solvers", "roamc.rewriting")
PLANNING = (*BELOW_PASSES, "roamc.notices", "roamc.passes", "roamc.planning")
RUNNING = (*GROUND, "roamc.cost", "roamc.codegen", "roamc.runtime", "roamc.planning.planned")

SOLVERS = ("order", "layout", "retain")  # each has a judge, which shares no code with the algorithms

# package or module → all of our own modules that it may import; the most specific name counts
MAY_IMPORT = {
    "roamc.solvers": ("roamc.solvers",),
    **dict.fromkeys(FLOOR, FLOOR),
    "roamc.compat_aot": (*FLOOR, "roamc.graph.keep"),
    **{f"roamc.solvers.{of}.validate": (f"roamc.solvers.{of}.problem", "roamc.solvers.status") for of in SOLVERS},
    "roamc.options": (*FLOOR, "roamc.cost", "roamc.solvers"),
    "roamc.notices": (*FLOOR, "roamc.options"),
    "roamc.graph": GROUND,
    "roamc.operators": GROUND,
    "roamc.cost": (*GROUND, "roamc.cost"),
    "roamc.optim": GROUND,
    "roamc.capture": (*GROUND, "roamc.notices", "roamc.optim", "roamc.capture"),
    "roamc.rewriting": (*GROUND, "roamc.options", "roamc.solvers", "roamc.rewriting"),
    "roamc.passes": BELOW_PASSES,  # and what lies in the folder of the same pass
    "roamc.planning": (*PLANNING, "roamc.runtime.blocks"),  # what programs hold idle is free for another plan
    "roamc.codegen": (*GROUND, "roamc.codegen"),
    "roamc.runtime": RUNNING,
    "roamc.frontends": (*PLANNING, *RUNNING, "roamc.capture", "roamc.optim", "roamc.frontends"),
    "roamc.report": (*PLANNING, "roamc.report"),
    "roamc.cli": ("roamc",),
    "roamc": ("roamc",),
}
GROUP_JUDGES = (  # what checks fused groups: every judge of programs, and what judges share
    *sorted(file.stem for file in (ROOT / "roamc/codegen").glob("*_judge.py")),
    *("group_needs", "group_verdicts", "kernel_columns", "kernel_values", "triton_stand_in"),
)
GROUP_EMITTERS = (
    *("roamc.operators.blocks", "roamc.operators.block_source.text_of", "roamc.operators.out_variants"),
    *(
        f"roamc.operators.gpu.{name}"
        for name in ("frame", "lines", "printed", "kernel.kernel_text", "launch_shapes", "fused_kernel")
    ),
)

# package or module → what it must not import
MUST_NOT_IMPORT = {
    "roamc.solvers": ("torch", "functorch", "triton"),
    "roamc.codegen.judge": ("roamc.operators.out_variants",),  # judges share nothing with what they judge
    **dict.fromkeys((f"roamc.codegen.{name}" for name in GROUP_JUDGES), GROUP_EMITTERS),
    "roamc.planning.layout_judge": ("roamc.passes", "roamc.solvers", "roamc.rewriting", "roamc.planning.other_orders"),
    "roamc": ("passes", "solvers"),  # names of folders; in Python they are roamc.passes and roamc.solvers
}
# The modules that may know a pass: the pipeline, what makes plans with it, and what explains them.
KNOW_PASSES = (
    "roamc.passes",
    "roamc.report",
    *(
        f"roamc.planning.{name}"
        for name in ("pipeline", "plan_check", "plan_maker", "planned", "search", "other_orders", "together")
    ),
)
# what reads addresses of fake tensors → the modules that may: behind capture the identity of a storage is its id
READ_ADDRESSES = {
    "roamc.compat.identity": (
        "roamc.compat",
        "roamc.compat_repeats",
        "roamc.capture",
        "roamc.frontends",  # there of real tensors
        "roamc.graph.storage_ids",
        "roamc.graph.verify",
    ),
    "roamc.graph.storage_ids.addresses": ("roamc.capture", "roamc.operators.corrections"),
    "roamc.graph.storage_ids.addresses_of": ("roamc.capture",),
}
# The modules that may name what torch keeps to itself.
COMPAT = (
    "roamc.compat",
    *(
        f"roamc.compat_{of}"
        for of in (
            "aot",
            "autocast",
            "calls",
            "dtensor",
            "dynamo",
            "eager",
            "fsdp",
            "groups",
            "hooks",
            "lines",
            "modules",
            "onednn",
            "operators",
            "repeats",
        )
    ),
)


def within(name: str, package: str) -> bool:
    """Whether the dotted `name` is `package` or lies in it."""
    return name == package or name.startswith(package + ".")


def imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of everything imported anywhere in a file of `package`.

    `from a import b` gives `a.b`, whether b is a module or a name in one.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                source = node.module or ""
                if node.level:
                    parents = package.split(".")
                    source = ".".join([*parents[: len(parents) - node.level + 1], *source.split(".")]).rstrip(".")
                yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every attribute of an import: `F.relu` gives torch.nn.functional.relu."""
    meaning: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                meaning[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            meaning.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                names.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in meaning:
                yield node.lineno, ".".join([meaning[inner.id], *reversed(names)])


def private_to_torch(name: str) -> bool:
    """Whether a dotted name is one that torch may change without notice."""
    if within(name, "torch.ops"):  # names of operators, not of modules: torch.ops.aten._softmax is everybody's
        return False
    hidden = any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    experimental = within(name, "torch.fx.experimental") or within(name, "functorch")
    return experimental or (within(name, "torch") and hidden)


def own(module: str) -> tuple[str, ...]:
    """The pass that a module belongs to: passes know themselves and no other."""
    parts = module.split(".")
    return (".".join(parts[:3]),) if parts[:2] == ["roamc", "passes"] and len(parts) > 2 else ()


def faults(source: str, module: str, package: str) -> list[str]:
    """Return what `source` imports or names against the rules, were it the file of `module` in `package`."""
    tree = ast.parse(source)
    imported = list(imports(tree, package))
    violations = set()
    ruled = max((other for other in MAY_IMPORT if within(module, other)), key=len)
    for line, name in imported:
        if within(name, "roamc") and not any(within(name, other) for other in (*MAY_IMPORT[ruled], *own(module))):
            violations.add((line, f"{ruled} must not import {name}"))
        for judged, forbidden in MUST_NOT_IMPORT.items():
            if within(module, judged) and any(within(name, other) for other in forbidden):
                violations.add((line, f"{judged} must not import {name}"))
        if within(name, "roamc.passes") and not any(within(module, other) for other in KNOW_PASSES):
            violations.add((line, f"{module} must not know pass {name}"))
    for line, name in [*imported, *attributes(tree)]:
        if name in READ_ADDRESSES and not any(within(module, other) for other in READ_ADDRESSES[name]):
            violations.add((line, f"{module} must not compare addresses of fake tensors by {name}"))
    if module not in COMPAT:
        for line, name in [*imported, *attributes(tree)]:
            if private_to_torch(name):
                violations.add((line, f"only {' and '.join(COMPAT)} may name {name}"))
    return [f"line {line}: {text}" for line, text in sorted(violations)]


def source_files() -> Iterator[tuple[Path, str, str]]:
    """Yield path, module and package of every file of the three folders."""
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = ".".join([package, *path.relative_to(ROOT / folder).parent.parts])
            yield path, inside if path.stem == "__init__" else f"{inside}.{path.stem}", inside


@pytest.mark.parametrize("folder", PACKAGES)
def test_imports_keep_to_the_rules(folder: str) -> None:
    violations = {
        str(path.relative_to(ROOT)): wrong
        for path, module, package in source_files()
        if path.is_relative_to(ROOT / folder) and (wrong := faults(path.read_text(), module, package))
    }
    assert not violations


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("roamc.solvers.order.greedy", "import torch"),
        ("roamc.solvers.order.greedy", "def f():\n    from torch import fx"),
        ("roamc.solvers.order.greedy", "from roamc.units import Bytes"),
        ("roamc.solvers.order.greedy", "from ...graph import TrainGraph"),
        ("roamc.passes.fuse", "from roamc.planning.pipeline import PIPELINE"),
        ("roamc.passes.fuse", "from ..codegen import source"),
        ("roamc.passes.fuse", "import roamc"),
        ("roamc.passes.fuse", "from roamc.passes import reorder"),
        ("roamc.passes.retain.search", "from roamc.passes.reorder import decide"),
        ("roamc.rewriting.rerun", "from roamc.passes import retain"),
        ("roamc.planning.layout_judge", "from roamc.rewriting.in_place import reuses"),
        ("roamc.solvers.order.validate", "from roamc.solvers.order.evaluate import live_bytes"),
        ("roamc.passes.fuse", "from roamc.graph.storage_ids import addresses"),
        ("roamc.graph.memory", "from roamc.compat import identity"),
        ("roamc.rewriting.rerun", "from roamc import compat\ncompat.identity(x)"),
        ("roamc.solvers.retain.validate", "from roamc.solvers.retain import simulate"),
        ("roamc.passes.fuse", "import torch\ntorch._dynamo.reset()"),
        ("roamc.passes.fuse", "from solvers.order import greedy"),
        ("roamc.capture.joint", "from roamc.frontends import backend"),
        ("roamc.codegen.source", "from roamc.cost import workspace"),
        ("roamc.graph.verify", "from roamc.solvers.order import validate"),
        ("roamc.units", "from roamc.graph import TrainGraph"),
        ("roamc.graph.memory", "import roamc.cli.commands"),
        ("roamc.cost.kind", "from roamc.passes import retain"),
        ("roamc.frontends.backend", "from roamc.passes.retain import Choice"),
        ("roamc.frontends.backend", "from torch._inductor import config"),
        ("roamc.frontends.backend", "from torch.utils import _pytree as pytree"),
        ("roamc.frontends.backend", "from torch.fx.experimental.proxy_tensor import make_fx"),
        ("roamc.frontends.backend", "import torch.utils as u\nu._pytree.tree_map(f, x)"),
        ("roamc.frontends.backend", "import importlib\nimportlib.import_module('torch._dynamo')"),
        ("roamc.frontends.backend", "from functorch.compile import aot_function"),
    ],
)
def test_breach_is_found(module: str, source: str) -> None:
    assert faults(source, module, module.rpartition(".")[0])


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "roamc.solvers.order.greedy",
            "import numpy\nfrom .problem import Problem\nfrom roamc.solvers import portfolio",
        ),
        ("roamc.passes.fuse", "from roamc.graph import TrainGraph\nfrom roamc.solvers.order import solve"),
        ("roamc.passes.retain.search", "from roamc.passes.retain import compress"),
        ("roamc.passes.retain.search", "from roamc.passes.retain.compress import Code"),
        ("roamc.capture.joint", "from roamc.graph.storage_ids import addresses"),
        ("roamc.passes.fuse", "import torch\nsoftmax = torch.ops.aten._softmax.default"),
        ("roamc.passes.fuse", "import torch\nversion = torch.__version__"),
        ("roamc.compat", "from torch._dynamo import reset"),
        ("roamc.frontends.backend", "from roamc.planning.pipeline import PIPELINE"),
        ("roamc.planning.pipeline", "from roamc.passes import fuse"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert faults(source, module, module.rpartition(".")[0]) == []
