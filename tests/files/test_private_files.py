"""Directories that only this user can write to, and the refusal of everything else."""

import os
import stat
from pathlib import Path

import pytest

from nanopage.files.private_files import check_private, make_private

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
SOMEBODY = 12345


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def cache(tmp_path):
    """A private directory with files and a folder in it."""
    directory = tmp_path / "cache"
    (directory / "folder").mkdir(parents=True)
    (directory / "weights").write_text("1")
    (directory / "folder" / "code").write_text("2")
    for path in (directory, directory / "weights", directory / "folder", directory / "folder" / "code"):
        path.chmod(0o700)
    return directory


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_missing_directories_are_created_for_the_owner_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [mode_of(tmp_path / "a"), mode_of(tmp_path / "a" / "b")] == [0o700, 0o700]


def test_an_existing_directory_keeps_its_mode(cache):
    cache.chmod(0o755)
    make_private(cache)
    assert mode_of(cache) == 0o755


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_an_existing_directory_that_others_may_write_to_is_refused(cache, mode):
    cache.chmod(mode)
    for check in (make_private, check_private):
        with pytest.raises(PermissionError, match="other users may write to it") as caught:
            check(cache)
        assert str(cache) in str(caught.value)
        assert f"{mode:04o}" in str(caught.value)


def test_a_file_is_no_directory(cache):
    with pytest.raises(NotADirectoryError, match="weights"):
        make_private(cache / "weights")


def test_private_files_pass(cache):
    for path in (cache, cache / "weights"):
        check_private(path)
    for mode in (0o600, 0o644, 0o755, 0o400):
        (cache / "folder" / "code").chmod(mode)
        check_private(cache)


@pytest.mark.parametrize("name", ["weights", "folder", "folder/code"])
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o666])
def test_anything_inside_that_others_may_write_to_is_refused_and_named(cache, name, mode):
    (cache / name).chmod(mode | 0o700)
    with pytest.raises(PermissionError, match="other users may write to it") as caught:
        check_private(cache)
    assert str(cache / name) in str(caught.value)


@as_root
@pytest.mark.parametrize("name", [".", "weights", "folder", "folder/code"])
def test_anything_of_another_user_is_refused_and_named(cache, name):
    os.chown(cache / name, SOMEBODY, -1)
    with pytest.raises(PermissionError, match=f"belongs to user {SOMEBODY}") as caught:
        check_private(cache)
    assert str(cache / name) in str(caught.value)


@as_root
def test_a_directory_of_another_user_is_refused_before_anything_is_put_into_it(cache):
    os.chown(cache, SOMEBODY, -1)
    with pytest.raises(PermissionError, match=f"belongs to user {SOMEBODY}"):
        make_private(cache)


@pytest.mark.parametrize("target", ["weights", "folder", "missing"])
def test_a_link_inside_is_refused(cache, tmp_path, target):
    (cache / "folder" / "link").symlink_to(cache / target)
    with pytest.raises(PermissionError, match="symbolic link") as caught:
        check_private(cache)
    assert str(cache / "folder" / "link") in str(caught.value)


def test_the_path_itself_may_be_a_link_whose_target_is_checked(cache, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(cache)
    for check in (make_private, check_private):
        check(link)
        cache.chmod(0o777)
        with pytest.raises(PermissionError, match="other users may write to it"):
            check(link)
        cache.chmod(0o700)


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        check_private(tmp_path / "missing")
