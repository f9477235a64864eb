"""Change one thing in a printed joint graph: the plan is as before, or a note or an error says what is missing.

Each edit takes away or changes a line, an annotation, a comment, an argument, a result or an input of a graph of torch,
and none makes the text of another program that is as right as the first. The peaks of the plan and of eager are those
of the unedited text; else a note is there that it had not, or the text is refused. Eager's peak may differ where notes
of both texts say that it is estimated.

    python -m tests.sweeps.edited_dumps [--only REGEX] [--workers N] [--log FILE]
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roamc.capture.dump import files, graphs, trace_log
from roamc.errors import RoamcError
from roamc.options import parse_options
from roamc.planning import search
from tests.sweeps import command, pool

GOOD = ("same", "said", "refused")

Edit = Callable[[str], str]


def swap(pattern: str, new: str, turn: int = 0) -> Edit:
    """An edit that replaces one match of ``pattern``, the ``turn``-th; from the end if it is negative.

    Raises:
        LookupError: later, when the text has no such match.
    """

    def edit(text: str) -> str:
        match = list(re.finditer(pattern, text, re.MULTILINE))[turn]
        return text[: match.start()] + match.expand(new) + text[match.end() :]

    return edit


def all_of(pattern: str, new: str) -> Edit:
    """An edit that replaces all matches of ``pattern``.

    Raises:
        LookupError: later, when the text has none.
    """

    def edit(text: str) -> str:
        changed, count = re.subn(pattern, new, text, flags=re.MULTILINE)
        if not count:
            raise LookupError(pattern)
        return changed

    return edit


_LINE = r"^ *\w+(?:: \"[^\"]*\")? = torch\.ops\.aten\.{}\.\w+\(.*\n"
_SAID = r": \"(\w+)\[([^\]]*)\]\[([^\]]*)\](\w*)\""
_RESULT = r"(^ *\w+)" + _SAID
"""The annotation of a result: dtype, shape, strides, device."""
_INPUT = r"(^ *(?:primals|tangents)_\d+)" + _SAID
_TANGENT = r"(^ *tangents_1)" + _SAID

COMMON: Mapping[str, Edit] = {
    "an operator's line is missing": swap(_LINE.format("mul"), "", -1),
    "a view's line is missing": swap(_LINE.format("t"), "", -1),
    "the last operator is missing": swap(r"^ *\w+: .*= torch\.ops\.[^\n]*\n(?=(?: *#.*\n|\s*\n)* *return)", ""),
    "one annotation is missing": swap(_RESULT + r"(?= = torch)", r"\1", 5),
    "an annotation of backward is missing": swap(_RESULT + r"(?= = torch)", r"\1", -5),
    "all annotations of results are missing": all_of(_RESULT + r"(?= = )", r"\1"),
    "an input's annotation is missing": swap(_INPUT, r"\1", 1),
    "one result has no strides": swap(_RESULT + r"(?= = torch)", r'\1: "\2[\3]\5"', 5),
    "an input has no strides": swap(_INPUT, r'\1: "\2[\3]\5"', 1),
    "nothing has strides": all_of(_SAID, r': "\1[\2]\4"'),
    "one result has no device": swap(_RESULT + r"(?= = torch)", r'\1: "\2[\3][\4]"', 5),
    "an input has no device": swap(_INPUT, r'\1: "\2[\3][\4]"', 1),
    "nothing has a device": all_of(_SAID, r': "\1[\2][\3]"'),
    "one result is on a GPU": swap(_RESULT + r"(?= = torch)", r'\1: "\2[\3][\4]cuda:0"', 5),
    "an input is on a GPU": swap(_INPUT, r'\1: "\2[\3][\4]cuda:0"', 1),
    "a result has other strides": swap(r"\[(\d+), 1\](?=\w*\" = torch)", r"[9\1, 1]", 3),
    "an input's strides are swapped": swap(r"(^ *primals_\d+: .*\]\[)(\d+), (\d+)\]", r"\1\3, \2]"),
    "a result's strides are swapped": swap(r"\[(\d+), 1\](?=\w*\" = torch\.ops\.aten\.\w*mm)", r"[1, \1]"),
    "a result is of another dtype": swap(_RESULT + r"(?= = torch)", r'\1: "f64[\3][\4]\5"', 5),
    "an input is of another dtype": swap(_INPUT, r'\1: "bf16[\3][\4]\5"', 1),
    "all inputs are of another dtype": all_of(_INPUT.replace(r"(\w+)\[", r"(f32)\["), r'\1: "f64[\3][\4]\5"'),
    "a result has another size": swap(_RESULT + r"(?= = torch)", r'\1: "\2[7, \3][1, \4]\5"', 5),
    "an input has another size": swap(_INPUT, r'\1: "\2[7, \3][1, \4]\5"', 1),
    "tangents have another shape": swap(_TANGENT, r'\1: "\2[3][1]\5"'),
    "tangents have another dtype": swap(_TANGENT, r'\1: "f64[\3][\4]\5"'),
    "tangents have no comment": swap(r"^( *tangents_1: .*?)  # .*$", r"\1"),
    "one source line is missing": swap(r"^ *# File: .*\n", "", 1),
    "no source line is there": all_of(r"^ *#.*File: .*\n", ""),
    "source lines have other numbers": all_of(r"(File: .*?):\d+ in", r"\1:1 in"),
    "no comment is there": all_of(r"#.*$", ""),
    "a gradient has no comment": swap(r",  # GradAOTOutput.*$", ",", 0),
    "no gradient has a comment": all_of(r",  # GradAOTOutput.*$", ","),
    "the loss has no comment": swap(r",  # PlainAOTOutput.*$", ","),
    "an input has no comment": swap(r"  # PlainAOTInput\(idx=1\)$", ""),
    "no input has a comment": all_of(r"  # \w+AOTInput.*$", ""),
    "inputs' comments are swapped": all_of(r"PlainAOTInput\(idx=1\)$", "PlainAOTInput(idx=2)"),
    "a gradient is of another input": swap(r"grad_of=PlainAOTInput\(idx=\d+\)", "grad_of=PlainAOTInput(idx=0)", -1),
    "a gradient is not returned": swap(r"^ *\w+,  # GradAOTOutput.*\n", "", -1),
    "a gradient is None": swap(r"^( *)\w+(,  # GradAOTOutput.*\n)", r"\1None\2", -1),
    "the first gradient is None": swap(r"^( *)\w+(,  # GradAOTOutput.*\n)", r"\1None\2", 0),
    "a None is not returned": swap(r"^ *None,.*\n", "", 0),
    "one more result is returned": swap(r"^( *)(\w+,  # PlainAOTOutput)", r"\1primals_1,\n\1\2"),
    "the loss is not returned": swap(r"^ *\w+,  # PlainAOTOutput.*\n", ""),
    "two results are swapped": swap(r"^( *\w+,)(  # Grad.*\n)( *\w+,)(  # Grad.*\n)", r"\3\2\1\4"),
    "an input is missing": swap(r"^ *primals_2: .*\n", ""),
    "the tangents are missing": swap(r"^ *tangents_1: .*\n", ""),
    "one more input is there": swap(r"^( *)(primals_1: .*\n)", '\\1\\2\\1primals_900: "f32[4096][1]cpu"\n'),
    "an argument is missing": swap(r"(torch\.ops\.aten\.\w*mm\.default\()\w+, ", r"\1"),
    "an argument is a text": swap(r"(torch\.ops\.aten\.mul\.Tensor\(\w+, )\w+\)", r"\g<1>'cpu')", -1),
    "a number is another": swap(r"(aten\.(?:view|expand)\.default\(\w+, \[)\d+", r"\g<1>5"),
    "an operator is another of the same shape": swap(r"aten\.relu\.|aten\.gelu\.|aten\.tanh\.", "aten.sin."),
    "names are not released": all_of(r";  \w+ = .*None$", ""),
    "two lines are swapped": swap(r"^( *\w+: .*= torch.*\n)( *\w+: .*= torch.*\n)", r"\2\1", 2),
    "a line is there twice": swap(r"^( *\w+: .*= torch.*\n)", r"\1\1", 3),
    "the flattening is missing": swap(r"^.*tree_flatten_spec.*\n", ""),
    "the signature is another": swap(r"^ *tangents,\n", ""),
    "tangents have another name": all_of(r"\btangents_(\d+)", r"gradients_\1"),
    "the second half is missing": swap(r"(?s)^ *\w+: [^\n]*\(tangents_1.*?(?=^ *return)", ""),
}
"""Edits of any graph."""

CHECKPOINTED: Mapping[str, Edit] = {
    "one number of a checkpoint is missing": swap(r"ac_graph_id: \d+ - PREFER_RECOMPUTE ", ""),
    "no number of a checkpoint is there": all_of(r"ac_graph_id: \d+ - PREFER_RECOMPUTE ", ""),
    "a checkpoint has no policy": all_of(r"(ac_graph_id: \d+) - \w+", r"\1"),
    "a checkpoint has an unknown policy": all_of(r"(ac_graph_id: \d+) - \w+", r"\1 - RATHER_NOT"),
    "no source line is there": all_of(r"^ *#.*File: .*\n", ""),
}
"""Edits of what the comments say of checkpoints."""

EDITS: dict[str, Mapping[str, Edit]] = {
    **dict.fromkeys(("written", "gated", "nanogpt-dropout"), COMMON),
    "checkpointed": CHECKPOINTED,
}
"""Name of a model, as tests.capture.dump.logged has them, to its edits."""


@functools.cache
def printed(name: str) -> str:
    """The joint graph of a model, as torch logs it in another process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCH_TRACE": folder, "OMP_NUM_THREADS": "1"}
        order = (sys.executable, "-m", "tests.capture.dump.logged", f"{folder}/plans.json", "none", f"{name}@aot_eager")
        subprocess.run(order, env=environment, check=True, capture_output=True, timeout=600)
        (log,) = Path(folder).glob("*.log")
        (piece,) = trace_log.read(trace_log.text_of(log), log)
    return piece.texts["aot_joint_graph"][0]


def peaks(text: str) -> tuple[int, int, tuple[str, ...]]:
    """The peak of a text's plan, eager's, and the notes of its graph.

    Raises:
        RoamcError: the text is refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.txt"
        file.write_text(text, "utf-8")
        graph = graphs.train_graph(files.read(str(file))[0], "graph", {})
    plan = search.run(graph, parse_options({})).plan
    return plan.peak_bytes, plan.baseline_needed_bytes, graph.notes


@functools.cache
def unedited(name: str) -> tuple[int, int, tuple[str, ...]]:
    """What :func:`peaks` gives for a model's text."""
    return peaks(printed(name))


def judge(name: str, what: str) -> dict[str, str]:
    """One edit's row: "same", "said" or "refused", "left out" where the text has not what it edits, or "silent"."""
    text = printed(name)
    try:
        changed = EDITS[name][what](text)
    except LookupError:
        return {"outcome": "left out", "text": "nothing to edit"}
    before = unedited(name)
    try:
        after = peaks(changed)
    except RoamcError as error:
        return {"outcome": "refused", "text": str(error)}
    more = [note for note in after[2] if note not in before[2]]
    if more:
        return {"outcome": "said", "text": "; ".join(more)}
    estimated = any("is estimated" in note for note in after[2])
    same = after[0] == before[0] and (after[1] == before[1] or estimated)
    return {"outcome": "same" if same else "silent", "text": f"{before[:2]} -> {after[:2]}"}


def work(only: str, name: str, first: int) -> Iterator[pool.Row]:
    """The rows of a model's edits from number ``first`` on."""
    for what in [what for what in EDITS[name] if re.search(only, f"{name}: {what}")][first:]:
        yield {"edit": what, **judge(name, what)}


def main() -> int:
    """Judge edits; 1 if one is silent."""
    parser = command.parser("one thing changed in printed graphs", "build/edited_dumps.jsonl")
    parser.add_argument("--only", default="", help="regular expression on e.g. 'written: an input is missing'")
    options: Any = parser.parse_args()
    rows = (
        (f"{name}: {row.get('edit', '?')}", {"name": name}, row)
        for name, _, row in pool.run(functools.partial(work, options.only), list(EDITS), options.workers)
    )
    return command.judged(rows, options.log, (*GOOD, "left out"))


if __name__ == "__main__":
    sys.exit(main())
