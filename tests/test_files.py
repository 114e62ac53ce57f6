"""Files that are whole or absent."""

import errno
import os
import subprocess
import sys

import pytest

from manus_fast.files import whole, write_text


def test_a_file_takes_the_place_of_an_earlier_one(tmp_path):
    write_text(tmp_path / "a", "one")
    with whole(tmp_path / "a") as file:
        file.write("·")
        assert (tmp_path / "a").read_text() == "one"
    assert (tmp_path / "a").read_bytes() == "·".encode() and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"No space left on device: '.*/a'"),
        (OSError(errno.EACCES, "Permission denied", "elsewhere"), "elsewhere"),
        (KeyboardInterrupt(), None),
    ],
)
def test_after_an_error_what_was_there_stays(tmp_path, error, text):
    write_text(tmp_path / "a", "one")
    with pytest.raises(type(error), match=text), whole(tmp_path / "a") as file:
        file.write("two")
        raise error
    assert (tmp_path / "a").read_text() == "one" and os.listdir(tmp_path) == ["a"]


def test_what_a_killed_process_left_is_removed_by_the_next_that_writes_there(tmp_path):
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    kept = {f".b.{gone}.partial", f".a.{os.getppid()}.partial", f".a.{gone}", ".a.x.partial", "a"}
    for name in (*kept, f".a.{gone}.partial", f".a.{10**30}.partial"):
        (tmp_path / name).write_text("half")
    write_text(tmp_path / "a", "one")
    assert set(os.listdir(tmp_path)) == kept and (tmp_path / "a").read_text() == "one"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_text(tmp_path / "missing" / "a", "x")
    assert caught.value.filename == str(tmp_path / "missing" / "a")
