"""Outputs: recognised, held, whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from d3d.errors import CantWrite, InvalidRequest
from d3d.files import (
    FileKind,
    Journal,
    alone_in,
    alone_with,
    explained,
    new_directory,
    write_whole,
)

LOG = FileKind("a log", ("step", "loss"))
PAGE = FileKind("a page", marker="written by us")
OLD, NEW = "old, written by us", "new, written by us"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"step": 1, "loss": 2}\n{"torn',
        b'{"step": 1, "lo',
        b'{\n  "step": 1,\n  "loss": 2\n}\n',
        b'{\n  "step": 1,\n  "lo',
    ],
)
def test_what_is_ours_is_recognised_whole_or_torn(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    LOG.check(path)
    LOG.check(tmp_path / "missing")
    LOG.check(Path(os.devnull))


@pytest.mark.parametrize(
    "content",
    [
        b'[{"prompt": "a"}]',
        b"text without a line end",
        b"text\n",
        b'{"step": 1}\n',
        b'{"steps": 1, "lo',
        b"\x80\0\0\0\0\0\0\0{}",
        b"[" * 100_000,
        b"1",
        b"null\n",
    ],
)
def test_what_is_not_ours_is_refused_and_stays(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    for refused in (
        lambda: LOG.check(path),
        lambda: PAGE.check(path),
        lambda: Journal(path, LOG).append("{}"),
        lambda: Journal(path, LOG).cut_torn_line(),
        lambda: Journal(path, LOG, shared=True).append("{}"),
    ):
        with pytest.raises(InvalidRequest, match=r"not a (log|page) written by d3d"):
            refused()
    assert path.read_bytes() == content


def test_a_directory_is_replaced_only_if_it_is_ours(tmp_path: Path) -> None:
    best = tmp_path / "best"
    LOG.check_in(best, "log.json")
    best.mkdir()
    LOG.check_in(best, "log.json")
    (best / "notes.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match="best exists and is not a log"):
        LOG.check_in(best, "log.json")
    (best / "log.json").write_text('{"step": 1, "loss": 2}')
    LOG.check_in(best, "log.json")


def test_a_torn_line_is_told_once_and_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    journal = Journal(path, LOG)
    assert [number for number, _ in journal.lines()] == [1]
    journal.append('{"step": 2, "loss": 1}')
    assert path.read_text() == '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n'
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "log.jsonl: its last line was torn" in told


def test_a_lock_leaves_nothing_and_says_who_holds_it(tmp_path: Path) -> None:
    place = tmp_path / "new"
    with alone_in(place, "d3d test"):
        who = rf"another d3d test is at work in .*new \(process {os.getpid()} on .* since 20"
        with pytest.raises(InvalidRequest, match=who), alone_in(place, "d3d test"):
            pass
        with pytest.raises(InvalidRequest, match=who), alone_in(place, "d3d test"):
            pass
    assert not place.exists(), "nothing was written, so the directory is not left either"
    with alone_with(tmp_path / "file", "d3d test"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_left_by_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on elsewhere since 2020-01-01")
    with alone_in(tmp_path, "d3d test"):
        assert f"process {os.getpid()}" in (tmp_path / ".lock").read_text()


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, PAGE, OLD)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("os.replace", "os.fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(f"d3d.files.{broken}", fail)
            with pytest.raises(CantWrite, match="file can't be written: No space left"):
                write_whole(path, PAGE, NEW)
        assert path.read_text() == OLD
        assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_links_modes_and_devices_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text(OLD)
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, PAGE, NEW)
    assert link.is_symlink()
    assert path.read_text() == NEW
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    write_whole(tmp_path / "fresh", PAGE, "")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o666 & ~mask
    path.write_text("the user's")
    with pytest.raises(InvalidRequest, match="not a page"):
        write_whole(link, PAGE, NEW)
    assert path.read_text() == "the user's"
    write_whole(Path(os.devnull), PAGE, "gone")
    assert Path(os.devnull).is_char_device()


def test_a_file_that_is_write_protected_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, PAGE, OLD)
    path.chmod(0o444)
    # the superuser may write to it all the same
    monkeypatch.setattr("os.access", lambda path, _: path.stat().st_mode & 0o200)
    with pytest.raises(CantWrite, match="Permission denied"):
        write_whole(path, PAGE, NEW)
    assert path.read_text() == OLD


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_device_is_explained() -> None:
    with pytest.raises(CantWrite, match="/dev/full can't be written: No space left"):
        write_whole(Path("/dev/full"), PAGE, "text")


def fill(path: Path, error: BaseException) -> None:
    with new_directory(path) as work:
        (work / "a").write_text("new")
        raise error


def test_a_failed_directory_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    with new_directory(path) as work:
        (work / "a").write_text("old")
    for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
        with pytest.raises((KeyboardInterrupt, CantWrite)):
            fill(path, error)
    assert (path / "a").read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["directory"]


@pytest.mark.parametrize(
    "words",
    [
        "[enforce fail at inline_container.cc:664] . unexpected pos 0 vs 64",
        "PytorchStreamWriter failed writing file data/0: file write failed",
        "I/O error: No space left on device (os error 28)",
    ],
)
def test_words_of_libraries_for_a_full_disk(words: str, tmp_path: Path) -> None:
    with pytest.raises(CantWrite), explained(tmp_path):
        raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="shape"), explained(tmp_path):
        raise RuntimeError("shape [2] is invalid")
