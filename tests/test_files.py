"""A file is there whole or not at all, and a path that cannot be written is refused at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import multihead as mh
from multihead.files import check_writable, write_whole


def refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_what_was_there_stays_if_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    monkeypatch.setattr(step, refuse)
    with pytest.raises(mh.InputError, match=r"^--out .*file cannot be written: No space left"):
        write_whole(path, b"new", "--out")
    with pytest.raises(mh.InputError, match=rf"^{path} cannot be written"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_permissions_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "apart").mkdir()
    real, link = tmp_path / "apart" / "real", tmp_path / "link"
    link.symlink_to(real)
    mask = os.umask(0o027)
    try:
        write_whole(link, b"content")
    finally:
        os.umask(mask)
    assert link.is_symlink()
    assert real.read_bytes() == b"content"
    assert real.stat().st_mode & 0o777 == 0o640
    write_whole(Path("/dev/null"), b"content")
    assert not Path("/dev/null").is_file()


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    long, longest = tmp_path / ("x" * 300), tmp_path / ("x" * 250)
    for path in (long, tmp_path / "file" / "below"):
        (tmp_path / "file").write_bytes(b"none")
        with pytest.raises(mh.InputError, match="cannot be written: "):
            write_whole(path, b"content")
        with pytest.raises(mh.InputError, match=r"leads nowhere|there is no folder"):
            check_writable(path, "--csv", "a.csv")
    check_writable(longest, "--csv", "a.csv")
    write_whole(longest, b"content")
    assert longest.read_bytes() == b"content"


def test_paths_are_refused_before_any_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.csv", "--csv", "a.csv")
    with pytest.raises(mh.InputError, match=r"--csv .* is a folder\. Name a file .* as a\.csv"):
        check_writable(tmp_path, "--csv", "a.csv")
    with pytest.raises(mh.InputError, match="there is no folder"):
        check_writable(tmp_path / "no" / "new.csv", "--csv", "a.csv")
