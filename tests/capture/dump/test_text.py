"""Printed graphs as people have them: every style of torch 2.0 to 2.14, what a log puts in front, and what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from roamc.capture.dump import annotations, files, graphs, names
from roamc.errors import DumpError
from roamc.graph import Phase, TrainGraph
from roamc.options import parse_options
from roamc.planning import search
from tests.graphs import aten

BODY = """\
def forward(self, primals, tangents):
    primals_1: "f32[8, 16][16, 1]cpu"  # PlainAOTInput(idx=0)
    primals_2: "f32[16, 16][16, 1]cpu"  # PlainAOTInput(idx=1)
    tangents_1: "f32[8, 16][16, 1]cpu"  # TangentAOTInput(output=PlainAOTOutput(idx=0))
    primals_1, primals_2, tangents_1, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)
    # File: net.py:3 in forward, code: return (x @ w).relu()
    mm: "f32[8, 16][16, 1]cpu" = torch.ops.aten.mm.default(primals_1, primals_2);  primals_2 = None
    relu: "f32[8, 16][16, 1]cpu" = torch.ops.aten.relu.default(mm);  mm = None
    detach: "f32[8, 16][16, 1]cpu" = torch.ops.aten.detach.default(relu)
    threshold_backward: "f32[8, 16][16, 1]cpu" = torch.ops.aten.threshold_backward.default(tangents_1, detach, 0)
    t: "f32[16, 8][1, 16]cpu" = torch.ops.aten.t.default(primals_1);  primals_1 = None
    mm_1: "f32[16, 16][16, 1]cpu" = torch.ops.aten.mm.default(t, threshold_backward);  t = threshold_backward = None
    return pytree.tree_unflatten([
        relu,  # PlainAOTOutput(idx=0)
        None,  # None
        mm_1,  # GradAOTOutput(grad_of=PlainAOTInput(idx=1))
    ], self._out_spec)
"""


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


CLASS = "class inner_f(torch.nn.Module):\n" + indented(BODY)
BARE = re.sub(r'"(f32\[[^\]]*\])\[[^\]]*\]cpu"', r'"\1"', CLASS)
PREFIX = "I1122 15:24:01.361000 77 torch/_dynamo/x.py:12] [0/0] [__aot_joint_graph] "
OLD = "[2023-11-20 15:52:38,797] [0/0] torch._functorch.aot_autograd.__aot_joint_graph: [INFO] "

PEAK = 512 + 512 + 1024
"""Bytes while the last product runs: the output, the gradient that it reads, and its result."""

STYLES = {
    "class": CLASS,
    "no class": BODY,
    "a log's prefix": "\n".join(PREFIX + line for line in CLASS.split("\n")),
    "a rank's and a log's prefix": "\n".join(f"[rank0]: {PREFIX}{line}" for line in CLASS.split("\n")),
    "a prefix of 2023": "\n".join(OLD + line for line in f"===== Joint graph 0 =====\n{CLASS}".split("\n")),
    "with <eval_with_key>": CLASS.replace("class ", " <eval_with_key>.9 class "),
    "no strides and devices": BARE,
    "annotations without quotes": re.sub(r': "(f32[^"]*)"', r": \1", BARE),
    "inputs on one line": BARE.replace('"  # PlainAOTInput(idx=0)\n', '"; ').replace(
        '"  # PlainAOTInput(idx=1)\n', '"; '
    ),
    "colours": CLASS.replace('"f32', '"\x1b[31mf32\x1b[0m'),
    "a quote of Markdown": "\n".join(f"> {line}" for line in CLASS.split("\n")),
    "a quote under words": "As printed:\n\n" + "\n".join(f"> {line}" for line in CLASS.split("\n")) + "\nSee above.",
    "lines of Windows": CLASS.replace("\n", "\r\n"),
    "a line number that no file has": CLASS.replace("net.py:3", f"net.py:{'9' * 5000}"),
    "a line of spaces": f"{' ' * 60_000}x\n{CLASS}",
    "behind other text": f"Here is my graph, as TORCH_LOGS prints it:\n\n{CLASS}",
}


def read(tmp_path: Path, text: str, **sizes: int) -> TrainGraph:
    file = tmp_path / "graph.txt"
    file.write_bytes(text.encode("utf-8"))
    return graphs.train_graph(files.read(str(file))[0], "graph", sizes)


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_the_same_graph(style: str, tmp_path: Path) -> None:
    graph, plain = read(tmp_path, STYLES[style]), read(tmp_path, CLASS)
    rows = [[(node.name, node.target, str(node.args)) for node in each.graph.nodes] for each in (graph, plain)]
    assert rows[0] == rows[1]
    assert graph.phase == plain.phase
    assert list(graph.phase.values()).count(Phase.BACKWARD) == 3
    assert search.run(graph, parse_options({})).plan.peak_bytes == PEAK


def test_symbolic_sizes_take_their_values(tmp_path: Path) -> None:
    text = CLASS.replace("f32[8, 16][16, 1]", "f32[s0, 16][16, 1]").replace("f32[16, 8][1, 16]", "f32[16, s0][1, 16]")
    with pytest.raises(DumpError, match=r"graph\.txt:\d+: the graph leaves a size open: give --set s0=N"):
        read(tmp_path, text)
    large = search.run(read(tmp_path, text, s0=80), parse_options({})).plan
    assert large.peak_bytes > search.run(read(tmp_path, text, s0=8), parse_options({})).plan.peak_bytes


def test_a_difference_from_what_torch_derives_is_a_note_and_the_file_counts(tmp_path: Path) -> None:
    graph = read(tmp_path, CLASS.replace('detach: "f32[8, 16][16, 1]cpu"', 'detach: "f32[8, 16][32, 1]cpu"'))
    assert any("1 of 6 results differ" in note and "detach is f32[8, 16]" in note for note in graph.notes)


def test_halves_are_one_step(tmp_path: Path) -> None:
    forward = """class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 16][16, 1]cpu", primals_2: "f32[16, 16][16, 1]cpu"):
        mm: "f32[8, 16][16, 1]cpu" = torch.ops.aten.mm.default(primals_1, primals_2);  primals_2 = None
        relu: "f32[8, 16][16, 1]cpu" = torch.ops.aten.relu.default(mm);  mm = None
        return (relu, primals_1, relu)
"""
    backward = """class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 16][16, 1]", relu: "f32[8, 16][16, 1]", tangents_1: "f32[8, 16][16, 1]cpu"):
        threshold_backward: "f32[8, 16][16, 1]cpu" = torch.ops.aten.threshold_backward.default(tangents_1, relu, 0)
        t: "f32[16, 8][1, 16]cpu" = torch.ops.aten.t.default(primals_1);  primals_1 = None
        mm_1: "f32[16, 16][16, 1]cpu" = torch.ops.aten.mm.default(t, threshold_backward)
        return (None, mm_1)
"""
    graph = read(tmp_path, forward + backward)
    assert search.run(graph, parse_options({})).plan.peak_bytes == PEAK
    assert any("a joint graph says more" in note for note in graph.notes)
    with pytest.raises(DumpError, match="a backward without the forward that saves its inputs"):
        read(tmp_path, backward)
    for changed in (
        forward.replace("(relu, primals_1, relu)", "(relu, primals_1)"),
        forward.replace("1, relu)", "1, mm)"),
    ):
        with pytest.raises(DumpError, match=r"graph\.txt: backward reads '\w+' where forward saves '\w+'"):
            read(tmp_path, changed + backward)


def instead(call: str) -> str:
    """The graph with another expression for its ReLU."""
    return CLASS.replace("torch.ops.aten.relu.default(mm)", call)


TWICE = '    mm: "f32[8, 16]" = torch.ops.aten.relu.default(primals_1)\n        relu: '
LARGE = CLASS.replace('primals_1: "f32[8, 16]', f'primals_1: "f32[{2**60}, 16]')
MANY = instead("torch.ops.aten.split.Tensor(mm, 1)").replace('"f32[8, 16]', '"f32[90000, 16]')
DEEP = "no statement of a graph|within each other"

WRONG = {
    "empty": ("", "the file is empty"),
    "no graph": ("loss 0.5\nloss 0.4\n", "no graph of torch is in it"),
    "cut off": (CLASS[: CLASS.index("t: ")], "the text ends after 4 statements.*it was cut off"),
    "print(graph)": ("graph():\n    %x : [num_users=1] = placeholder[target=x]\n", "print gm.print_readable"),
    "a line twice": (CLASS.replace("    relu: ", TWICE), "mm is there twice"),
    "a line is missing": (re.sub(r".* mm: .*\n", "", CLASS), "mm was never made"),
    "another operator": (instead("torch.ops.aten.fast_relu.default(mm)"), "unknown operator"),
    "a shape that cannot be": (CLASS.replace('primals_2: "f32[16', 'primals_2: "f32[15'), "refuses its arguments"),
    "a dtype of another world": (CLASS.replace('primals_1: "f32', 'primals_1: "f33'), "unknown dtype"),
    "a library": (instead("torch.ops.load_library('x.so')"), "unknown operator"),
    "an import": (instead("__import__('os')"), "unknown operator"),
    "an attribute": (instead("mm.__class__.mro()"), "unknown operator"),
    "a file": (instead("torch.ops.aten.from_file.default('/etc/passwd')"), "unknown operator"),
    "a lambda": (instead("(lambda: 1)()"), "no value of a graph"),
    "many results": (MANY, "may give 90000 results"),
    "many dimensions": (
        CLASS.replace("# File", f'zz: "f32[{"1," * 99}1]"\n        # File'),
        "a tensor of 100 dimensions",
    ),
    "a size above all memory": (LARGE, "no tensor that can exist"),
    "a tower of powers": (CLASS.replace('primals_1: "f32[8', 'primals_1: "f32[((9**8)**8)**8'), "a size above 2"),
    "a product above all sizes": (instead("operator.mul(9223372036854775807, 9)"), "a number that no size can be"),
    "many steps": (instead("torch.ops.aten.diff.default(mm, 1000000000)"), "may give 1000000000 results"),
    "nesting": (instead(f"torch.ops.aten.relu.default({'[' * 40}mm{']' * 40})"), "brackets are open"),
    "a chain without brackets": (instead(f"torch.ops.aten.relu.default({'-' * 3000}mm)"), DEEP),
    "a sum without brackets": (instead(" + ".join(["mm"] * 3000)), DEEP),
    "a long line": (CLASS.replace("primals_2 = None", f"primals_2 = {'x' * 70000}"), "a line of more than"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line_with_the_place(what: str, tmp_path: Path) -> None:
    text, message = WRONG[what]
    with pytest.raises(DumpError, match=message) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


NO_COMMENTS = re.sub(r",? +# (?:Plain|Grad|Tangent|None).*", lambda match: match[0].partition(" ")[0], CLASS)
FITS, CHECKPOINTS = "the returned values do not fit the inputs", "have no comment that they run again"
LACKING = {
    "a gradient": (CLASS, "mm_1,  # GradAOTOutput(grad_of=PlainAOTInput(idx=1))", "", f"{FITS} (primals_1)"),
    "the None of an input": (CLASS, "None,  # None", "", f"{FITS} (primals_1)"),
    "the output": (CLASS, "relu,  # PlainAOTOutput(idx=0)", "", FITS),
    "a name": (CLASS, "mm_1,  # Grad", "None,  # Grad", f"{FITS} (primals_2)"),
    "the right comment": (CLASS, "grad_of=PlainAOTInput(idx=1)", "grad_of=PlainAOTInput(idx=0)", f"{FITS} (primals_2)"),
    "no input": (CLASS, "tangents_1: ", 'primals_3: "f32[4][1]cpu"\n        tangents_1: ', FITS),
    "the None, without comments": (NO_COMMENTS, "            None,\n", "", FITS),
    "the marks of a checkpoint": (
        CLASS,
        "return (x @ w)",
        "x = checkpoint(layer, x)",
        f"2 operators of checkpoints (mm, ...) {CHECKPOINTS}",
    ),
    "the policy": (
        CLASS,
        "# File",
        "# ac_graph_id: 4 - RATHER_NOT File",
        f"2 operators of checkpoints (mm, ...) {CHECKPOINTS}",
    ),
    "source lines": (CLASS, "# File: net.py:3", "#", "the file has no source lines"),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_a_text_lacks_is_a_note(what: str, tmp_path: Path) -> None:
    text, old, new, note = LACKING[what]
    assert old in text
    for whole in (text, NO_COMMENTS):
        assert not any(part in "; ".join(read(tmp_path, whole).notes) for part in (FITS, CHECKPOINTS, "source lines"))
    assert any(note in each for each in read(tmp_path, text.replace(old, new)).notes)


def test_a_parameter_without_a_gradient_is_nothing_that_was_changed(tmp_path: Path) -> None:
    """Torch prints None with the comment of a gradient where a parameter is used under no_grad only."""
    gradient = "# GradAOTOutput(grad_of=PlainAOTInput(idx=1))"
    frozen = CLASS.replace("tangents_1: ", 'primals_3: "f32[4][1]cpu"  # PlainAOTInput(idx=2)\n        tangents_1: ')
    frozen = frozen.replace("primals_2, tangents_1,", "primals_2, primals_3, tangents_1,")
    frozen = frozen.replace(gradient, f"{gradient}\n            None,  {gradient.replace('1', '2')}")
    assert not any(FITS in note for note in read(tmp_path, frozen).notes)


def test_a_text_says_that_it_lacks_the_writes_of_the_model(tmp_path: Path) -> None:
    assert graphs.NO_DYNAMO in read(tmp_path, CLASS).notes


def test_a_device_that_roamc_does_not_plan_for_is_a_note(tmp_path: Path) -> None:
    notes = "; ".join(read(tmp_path, CLASS.replace('cpu"', 'xpu:0"')).notes)
    assert "the file's tensors are on xpu: planned as on a CPU" in notes
    assert "results differ" not in notes
    call = instead("torch.ops.aten.zeros.default([8, 16], device = device(type='\\x1b]0;P'))")
    assert all(note.isprintable() for note in read(tmp_path, call).notes)


def test_only_the_axis_that_is_taken_apart_counts() -> None:
    tensor = torch.empty(3, 8192, device="meta")
    names.check_results(aten.unbind.int, (tensor,), {})
    names.check_results(aten.split.Tensor, (tensor, 1), {"dim": -2})
    for target, args in ((aten.unbind.int, (tensor, 1)), (aten.split.Tensor, (tensor, 1, 1))):
        with pytest.raises(DumpError, match="may give 8192 results"):
            names.check_results(target, args, {})


def test_sizes_may_have_brackets_within_brackets() -> None:
    said = annotations.parsed("f32[Max(1, (s0//2)), 4][4, Min(1, Max(s0, 2))]cpu", annotations.Sizes({"s0": 8}, "x"), 1)
    assert isinstance(said, annotations.TensorType)
    assert (said.shape, said.stride) == ((4, 4), (4, 1))


def test_an_error_in_a_log_names_its_line(tmp_path: Path) -> None:
    head = 'V1122 15:24:01.361000 77 torch/x.py:12] {"aot_joint_graph": {}, "frame_id": 0, "frame_compile_id": 0}'
    text = CLASS.replace("aten.relu.default", "aten.fast_relu.default")
    log = "\n".join((head, *(f"\t{line}" for line in text.split("\n"))))
    line = next(at for at, each in enumerate(log.split("\n"), 1) if "fast_relu" in each)
    with pytest.raises(DumpError, match=rf"graph\.txt:{line}: "):
        read(tmp_path, log)


def test_the_operators_of_inductor_are_a_note(tmp_path: Path) -> None:
    text = instead("torch.ops.prims.convert_element_type.default(mm, torch.float32)")
    assert files.DECOMPOSED in read(tmp_path, text).notes
    assert files.DECOMPOSED not in read(tmp_path, CLASS).notes


def test_a_joint_graph_without_tangents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no input is tangents_1: a line is missing"):
        read(tmp_path, CLASS.replace("tangents_1", "gradients_1"))


@pytest.mark.parametrize(("data", "message"), [(b"\xff\xfeg\x00", "UTF-16"), (b"PK\x03\x04\0\0", "no text")])
def test_what_is_no_text_is_said(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.bin"
    file.write_bytes(data)
    with pytest.raises(DumpError, match=message):
        files.read(str(file))


def test_a_cut_text_never_has_an_answer(tmp_path: Path) -> None:
    lines = CLASS.split("\n")
    for length in range(1, len(lines) - 2):
        with pytest.raises(DumpError, match=r"graph\.txt"):
            read(tmp_path, "\n".join(lines[:length]))
