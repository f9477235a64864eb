"""A stranger's file is read in a process with limits, and nothing in it is executed, imported or opened."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from roamc.capture.dump import archive, confined, files
from roamc.capture.dump.recognise import PRINTED, is_dump
from roamc.errors import DumpError
from tests.capture.dump.archives import Mixed, changed, save, tokens
from tests.capture.dump.hostile import EVIL, mutant
from tests.capture.dump.test_text import CLASS, instead


def test_what_is_read_is_what_the_reader_returns(tmp_path: Path) -> None:
    text, model = tmp_path / "graph.txt", save(tmp_path / "m.pt2", Mixed(), (tokens(4),))
    text.write_text(instead("torch.ops.aten.add.Tensor(mm, complex(1.0, 2.0), alpha=-inf)"), "utf-8")
    assert confined.read("graphs", str(text)) == files.read(str(text))
    assert confined.read("archive", str(model)) == archive.read(str(model))


def test_an_error_is_one_line_without_characters_that_a_terminal_obeys(tmp_path: Path) -> None:
    file = tmp_path / "\x1b[2Jgraph.txt"
    file.write_text("no graph", "utf-8")
    with pytest.raises(DumpError, match="no graph of torch is in it") as caught:
        confined.read("graphs", str(file))
    assert str(caught.value).isprintable()


def test_what_lies_beside_pythons_libraries_has_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "roamc").mkdir()
    (packages / "roamc/__init__.py").write_text("raise RuntimeError('another version')", "utf-8")
    (packages / "sitecustomize.py").write_text("print('a word on stdout')", "utf-8")
    (text := tmp_path / "graph.txt").write_text(CLASS, "utf-8")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    assert confined.read("graphs", str(text)) == files.read(str(text))


def test_the_file_may_be_stdin(tmp_path: Path) -> None:
    (text := tmp_path / "graph.txt").write_text(CLASS, "utf-8")
    run = "from roamc.capture.dump import confined; confined.read('graphs', '/dev/stdin')"
    with text.open() as stdin:
        child = subprocess.run((sys.executable, "-c", run), stdin=stdin, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


def test_a_queue_with_the_name_of_a_graph_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / PRINTED)
    assert not is_dump(str(tmp_path))


def _packed(path: Path) -> None:
    with gzip.open(path, "wb") as file:
        for _ in range(256):
            file.write(b"(" * (1 << 20))


def _deep(path: Path) -> None:
    save(path, Mixed(), (tokens(4),))
    changed(path, **{"m/models/model.json": b"[" * (1 << 24)})


def _zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("m/models/model.json", b"[" * (1 << 28))


BOMBS = {
    "a packed log": (_packed, "graphs", "more memory|cannot be read|more than 256 MiB|no graph"),
    "a deep program": (_deep, "archive", "is no JSON"),
    "a packed program": (_zip_bomb, "archive", "more than 32 MB"),
    "many lines": (lambda path: path.write_text("x\n" * (1 << 26)), "graphs", "more than 1 GiB of memory"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_ends_in_one_error(what: str, tmp_path: Path) -> None:
    make, reader, message = BOMBS[what]
    path = tmp_path / "m.pt2"
    make(path)
    with pytest.raises(DumpError, match=message) as caught:
        confined.read(reader, str(path))
    assert "\n" not in str(caught.value)


def test_no_class_but_plain_data_comes_back() -> None:
    with pytest.raises(pickle.UnpicklingError, match="no plain data"):
        confined._PlainData(io.BytesIO(pickle.dumps(Path("x")))).load()


WATCHED = """
import sys
path, reader = sys.argv[1:]
from roamc.capture.dump import archive, confined, files
from roamc.errors import RoamcError
import encodings.utf_8_sig, encodings.cp437
seen = []
def watch(event, args):
    if event.split(".")[0] in ("open", "import", "exec", "os", "subprocess", "socket", "ctypes", "pickle", "shutil"):
        seen.append((event, str(args[0])[:200] if args else ""))
sys.addaudithook(watch)
try:
    confined.READERS[reader](path)
except RoamcError as error:
    print(error)
wrong = [each for each in seen if each[0] != "open" or each[1] not in (path, "<size>", "<graph>", "<unknown>")]
assert not wrong, wrong
assert not any(name.startswith("torch") or name == "evil" for name in sys.modules)
"""


@pytest.mark.parametrize("kind", ["text", "log", "archive"])
def test_reading_does_nothing_but_open_the_file(kind: str, tmp_path: Path) -> None:
    model = save(tmp_path / "m.pt2", Mixed(), (tokens(4),))
    reader = "archive" if kind == "archive" else "graphs"
    path = tmp_path / "stranger.pt2"
    for data in [mutant(kind, seed, model.read_bytes()) for seed in range(4)]:
        path.write_bytes(data)
        command = (sys.executable, "-c", WATCHED, str(path), reader)
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        assert child.returncode == 0, child.stderr


DERIVED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from roamc.capture.dump import confined, graphs
from roamc.errors import RoamcError
from tests.capture.dump.hostile import EVIL
from tests.capture.dump.test_text import CLASS, instead
path = Path(sys.argv[2])
def plan(text):
    path.write_text(text, "utf-8", errors="replace")
    try:
        return graphs.train_graph(confined.read("graphs", str(path))[0], "graph", {"s0": 8})
    except RoamcError as error:
        return error
assert not isinstance(plan(CLASS), RoamcError)
processes, wrong = [], []
def watch(event, args):
    if event == "subprocess.Popen":
        processes.append(args[1])
    elif event == "open" and "/etc" in str(args[0]):
        wrong.append((event, str(args)))
    elif event.startswith(("socket.", "os.system", "os.exec", "os.spawn")):
        wrong.append((event, str(args)))
    elif event == "import" and ("evil" in str(args[0])):
        wrong.append((event, str(args)))
sys.addaudithook(watch)
for each in EVIL:
    plan(instead(each))
assert not wrong, wrong
assert len(processes) == len(EVIL)
assert all(list(each)[:3] == [sys.executable, "-IS", "-c"] for each in processes), processes
assert not list(path.parent.glob("evil*"))
"""


def test_deriving_starts_no_process_but_the_reader(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    command = (sys.executable, "-c", DERIVED, root, str(tmp_path / "graph.txt"))
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert EVIL[0] not in CLASS


def test_a_reading_process_that_gives_no_plain_data_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "_START", "print('hello')")
    with pytest.raises(DumpError, match=r"graph\.txt: cannot be read: the process that reads it gave no plain data"):
        confined.read("graphs", str(tmp_path / "graph.txt"))
