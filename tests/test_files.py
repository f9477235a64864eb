"""Files that roamc writes are there whole or not at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from roamc import files
from roamc.cost import profile as profiles
from roamc.cost.profile import load_profile, read_profile, store_profile
from roamc.errors import PlanError, ProfileError
from roamc.planning.plan import load_plan

PACKAGES = [Path(__file__).parent.parent / name for name in ("roamc", "passes", "solvers")]


def test_text_is_written_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("one\n", "two\r\n", ""):
        files.write_text(path, text)
        assert path.read_bytes() == text.encode()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_file_stays_as_it_was_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    files.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "new \udcff")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_what_a_killed_process_left_a_day_ago_is_removed(tmp_path: Path) -> None:
    names = [".roamc-1-0123abcd.tmp", ".roamc-2-0123abcd.tmp", ".roamc-notes.tmp"]
    for name in names:
        (tmp_path / name).write_text("half")
    for name in names[1:]:
        os.utime(tmp_path / name, (0, 0))
    files.write_text(tmp_path / "plan.json", "new")
    assert sorted(os.listdir(tmp_path)) == [names[0], names[2], "plan.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from roamc import files
os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
files.write_text(Path(sys.argv[1]), "new")
"""


def test_process_killed_in_the_middle_of_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.write_text(path, "old")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_writers_at_once_leave_one_of_their_texts(tmp_path: Path) -> None:
    path, texts = tmp_path / "plan.json", [letter * 100_000 for letter in "abcd"]
    threads = [threading.Thread(target=files.write_text, args=(path, text)) for text in texts for _ in range(5)]
    for thread in threads:
        thread.start()
        assert not path.exists() or path.read_text() in texts
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["plan.json"]


def test_link_mode_and_pipe_stay_what_they_are(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    files.write_text(target, "old")
    target.chmod(0o640)
    link.symlink_to(target)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o640)
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    files.write_text(pipe, "through")
    assert reader.communicate()[0] == "through"
    with pytest.raises(IsADirectoryError):
        files.write_text(tmp_path, "new")


def test_half_a_profile_is_refused_by_name_and_a_whole_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "measured_folder", lambda: tmp_path)
    profile = load_profile("cpu", "cpu")
    path = store_profile(profile)
    whole = path.read_text()
    for text in ("", whole[: len(whole) // 2], "[]", whole.replace('"threads"', '"thread"')):
        path.write_text(text)
        with pytest.raises(ProfileError, match=re.escape(str(path)) + ".*measure again with: roamc calibrate"):
            load_profile("cpu")
    assert read_profile(store_profile(profile)) == profile


def test_a_device_that_never_ends_is_no_plan() -> None:
    with pytest.raises(PlanError, match=r"^/dev/zero: file too large$"):
        load_plan("/dev/zero")


def test_nothing_else_writes_files() -> None:
    may = ("files.py", "machine_code.py")  # the second while an installation is built, and solvers import solvers only
    writes = re.compile(r"\.write_(?:text|bytes)\(|\bopen\([^)]*[\"'][wx]")
    writers = [
        str(path.relative_to(folder.parent))
        for folder in PACKAGES
        for path in folder.rglob("*.py")
        for line in path.read_text().splitlines()
        if writes.search(line) and path.name not in may and "files.write_text(" not in line
    ]
    assert writers == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_device_that_takes_nothing_is_named() -> None:
    with pytest.raises(OSError, match="/dev/full"):
        files.write_text(Path("/dev/full"), "text")
