"""What bubblewrap is told to show of this machine: Python wherever it lies, and nothing beside its own parts."""

import shutil
import sys
import tempfile
import venv
from pathlib import Path

import pytest

from slipstream.rewards.apart import trial, walls
from slipstream.rewards.apart.program import Program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="walls are Linux's")


def test_no_folder_beside_pythons_own_parts_is_shown() -> None:
    """A virtual environment may be the project's folder, with the runs in it."""
    shown = walls._python_paths()
    assert str(Path(sys.prefix)) not in shown
    assert f"{Path(sys.prefix)}/lib" in shown or sys.prefix.startswith("/usr")


@pytest.mark.process
@pytest.mark.skipif(
    shutil.which("bwrap") is None or trial.held().walls.kind != "bubblewrap",
    reason="bubblewrap is not here, or may not run: apt install bubblewrap",
)
def test_a_python_that_lies_in_the_temporary_folder_is_held_by_bubblewrap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder)
        monkeypatch.setattr(sys, "prefix", folder)
        monkeypatch.setattr(sys, "executable", f"{folder}/bin/python")
        monkeypatch.setattr(walls, "_bubblewrap", walls._bubblewrap.__wrapped__)  # it keeps the first answer
        with Program(walls.Walls("bubblewrap")) as program:
            assert program.run("completion", "open('/tmp/mine', 'w').close()") is None
            ended = program.run("completion", f"open({folder!r} + '/bin/python', 'ab')")
            assert ended is not None
            assert "Read-only" in ended.detail or "Permission" in ended.detail
