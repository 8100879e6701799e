"""CURVE key files."""

from __future__ import annotations

import stat

import pytest

from slipstream.errors import UserError
from slipstream.transport.zeromq import keys


def test_a_saved_key_pair_is_private_and_loads_again(tmp_path):
    pair = keys.generate()
    keys.save(tmp_path / "run.key", pair)
    assert stat.S_IMODE((tmp_path / "run.key").stat().st_mode) == 0o600
    assert keys.load(tmp_path / "run.key") == pair
    assert pair.secret not in repr(pair)
    assert keys.generate() != pair


def test_an_existing_key_file_is_never_overwritten(tmp_path):
    keys.save(tmp_path / "run.key", keys.generate())
    with pytest.raises(UserError, match="exists"):
        keys.save(tmp_path / "run.key", keys.generate())


def test_a_key_file_that_everyone_can_read_is_refused(tmp_path):
    keys.save(tmp_path / "run.key", keys.generate())
    (tmp_path / "run.key").chmod(0o644)
    with pytest.raises(UserError, match=r"0644.*chmod 600"):
        keys.load(tmp_path / "run.key")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "public: abc\nsecret: def\n",
        "public: {a.public}\n",
        "public: {a.public}\nsecret: {b.secret}\n",
        "public: {a.public}\nsecret: {short}\n",
        "public: ü\n",
    ],
)
def test_a_file_without_a_matching_pair_is_refused(tmp_path, text):
    a, b = keys.generate(), keys.generate()
    path = tmp_path / "run.key"
    path.write_text(text.format(a=a, b=b, short=a.secret[:-1]))
    path.chmod(0o600)
    with pytest.raises(UserError, match="key"):
        keys.load(path)


def test_a_missing_key_file_says_how_to_make_one(tmp_path):
    with pytest.raises(UserError, match=r"slipstream keys .*network.keys"):
        keys.load(tmp_path / "absent.key")


def test_a_runs_key_is_made_once_in_a_folder_of_its_own(tmp_path):
    path = keys.make(tmp_path / "run" / "keys")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert keys.keys_of(str(path.parent)) == keys.load(path)
    with pytest.raises(UserError, match="exists"):
        keys.make(path.parent)


def test_no_folder_is_no_key_and_a_folder_without_one_is_refused(tmp_path):
    assert keys.keys_of(None) is None
    with pytest.raises(UserError, match="slipstream keys"):
        keys.keys_of(str(tmp_path))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no key can be made"):
        keys.make(tmp_path / "file" / "keys")
