"""Files as a stranger may make them: mutants of a printed graph, of a log and of an archive."""

from __future__ import annotations

import io
import json
import random
import re
import zipfile
from collections.abc import Callable

from tests.capture.dump.test_text import CLASS

LOG = "V1122 15:24:01.361000 77 torch/_dynamo/x.py:12] "

EVIL = (
    "__import__('os').system('touch evil')", "torch.ops.load_library('evil.so')", "eval('1')", "open('/etc/passwd')",
    "torch.ops.aten.from_file.default('/etc/passwd')", "torch.load('evil')", "(lambda: 0)()", "mm.__class__.__mro__",
    "10**10**10", "[0] * 10**12", "1 << 10**9", "'x' * 10**9", "9" * 5_000, "9223372036854775808", "1e999", "-1",
    "torch.ops.aten.split.Tensor(mm, 1)", "torch.ops.aten.diff.default(mm, 1000000000)",
    "torch.ops.aten.empty.memory_format([4611686018427387904, 2])", "mm", "relu", "nan", "None", "self.evil",
    "((((((((((((((((((((((((((((((((((((((((1))))))))))))))))))))))))))))))))))))))))", "[" * 30 + "]" * 30,
    "operator.pow(9, 9999999)", "operator.mul(9223372036854775807, 9223372036854775807)", "\x1b[2J", "\0",
)  # fmt: skip
"""What stands in the place of an operator, name or number."""

SIZES = ("s0", "s0**8**8", "10**10**10", "9" * 30, "-4", "0", "((((s0", "Mul(s0, s0, s0)", "4611686018427387904")


def log_of(text: str) -> str:
    """A log with a joint graph."""
    head = {"frame_id": 0, "frame_compile_id": 0, "attempt": 0}
    artifact = {"artifact": {"name": "aot_joint_graph_fw_metadata", "encoding": "string"}, **head}
    payload = "\n".join(f"\t{line}" for line in text.split("\n"))
    return (
        f"{LOG}{json.dumps({'dynamo_start': {}, **head})}\n"
        f"{LOG}{json.dumps({'aot_joint_graph': {}, **head, 'has_payload': '0'})}\n{payload}\n"
        f"{LOG}{json.dumps(artifact)}\n\tViewAndMutationMeta(static_input_indices=[1])\n"
    )


def mutant_of_text(text: str, draw: random.Random) -> bytes:
    """``text`` with one to three changes."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        text = draw.choice(_CHANGES)(text, draw)
    data = bytearray(text.encode("utf-8", "replace"))
    for _ in range(draw.choice((0, 0, 1, 4))):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def _cut(text: str, draw: random.Random) -> str:
    return text[: draw.randrange(len(text) + 1)]


def _without(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + text[at + draw.choice((1, 10, 200)) :]


def _splice(text: str, draw: random.Random) -> str:
    at, other = draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)
    return text[:at] + text[other : other + draw.choice((3, 30, 300))] + text[at:]


def _lines(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[draw.choice((at, other))]
    return "\n".join(lines)


def _put(pattern: str, values: tuple[str, ...]) -> Callable[[str, random.Random], str]:
    def change(text: str, draw: random.Random) -> str:
        places = list(re.finditer(pattern, text))
        if not places:
            return text
        place = draw.choice(places)
        return text[: place.start()] + draw.choice(values) + text[place.end() :]

    return change


def _many(text: str, draw: random.Random) -> str:
    line = draw.choice(text.split("\n"))
    return text.replace(line, "\n".join([line] * draw.choice((2, 50, 2_000))), 1)


_CHANGES = (
    _cut, _without, _splice, _lines, _many, _put(r"torch\.ops\.[\w.]+\([^)]*\)", EVIL), _put(r"\b\w+\b", EVIL),
    _put(r"\b\d+\b", SIZES + EVIL), _put(r"\b(?:mm|relu|primals_1|detach)\b", ("mm", "relu", "detach", "tangents_1")),
)  # fmt: skip

_JSON_CHANGES = (
    _cut, _without, _splice, _put(r'"torch\.ops\.[\w.]+"', tuple(json.dumps(each) for each in EVIL)),
    _put(r"\b\d+\b", (*SIZES, "1e999", "NaN", "null", "[]", "{}", '"x"', "true", "9223372036854775807")),
    _put(r'"\w+"', tuple(json.dumps(each) for each in (*EVIL, "as_graph", "as_custom_obj", "mm", "x", "forward"))),
    _put(r'"expr_str": "[^"]*"', tuple(f'"expr_str": {json.dumps(each)}' for each in SIZES)),
    _put(r"\{", ("[" * 20_000, '{"as_graph":' * 3_000, "{{", '{"a": 1, "a": 2, ')),
    _put(r'"sizes": \[[^\]]*\]', ('"sizes": [{"as_int": 4611686018427387903}, {"as_int": 9}]', '"sizes": []')),
)  # fmt: skip


def mutant_of_archive(data: bytes, draw: random.Random) -> bytes:
    """An archive with changes of a JSON member, of the members, or of its bytes."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        members = {name: file.read(name) for name in file.namelist()}
    kind = draw.choice(("json", "json", "json", "json", "members", "bytes"))
    if kind == "bytes":
        changed = bytearray(data[: draw.choice((len(data), draw.randrange(len(data))))])
        for _ in range(draw.choice((1, 8))):
            at = draw.randrange(len(changed) or 1)
            del changed[at : at + 1]
            if changed:
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    names = [name for name in members if name.endswith(".json")]
    chosen = draw.choice([*names, *[name for name in names if "models/" in name] * 4])
    extra: list[tuple[zipfile.ZipInfo, bytes]] = []
    if kind == "json":
        text = members[chosen].decode()
        for _ in range(draw.choice((1, 1, 2))):
            text = draw.choice(_JSON_CHANGES)(text, draw)
        members[chosen] = text.encode("utf-8", "replace")
    else:
        link = zipfile.ZipInfo(draw.choice((chosen, "m/models/link.json")))
        link.external_attr = 0o120777 << 16
        bomb = zipfile.ZipInfo(draw.choice(("m/models/bomb.json", chosen)))
        bomb.compress_type = draw.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
        outside = zipfile.ZipInfo(draw.choice(("../../evil", "/etc/evil", "m/..\\evil", "m/models/../../../evil.json")))
        extra = [draw.choice(((link, b"/etc/passwd"), (bomb, b"[" * (40 << 20)), (outside, b"{}")))]
        if draw.random() < 0.5:
            del members[draw.choice(list(members))]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            if all(info.filename != name for info, _ in extra):
                file.writestr(name, content)
        for info, content in extra:
            file.writestr(info, content, compress_type=info.compress_type)
    return buffer.getvalue()


def mutant(kind: str, seed: int, archive: bytes) -> bytes:
    """A file of the kind "text", "log" or "archive"; ``archive`` is a whole one."""
    draw = random.Random(f"{kind} {seed}")
    if kind == "archive":
        return mutant_of_archive(archive, draw)
    return mutant_of_text(CLASS if kind == "text" else log_of(CLASS), draw)
