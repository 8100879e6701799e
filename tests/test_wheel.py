"""The wheel holds everything, and works far from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def _run(argv: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}
    environment |= {"PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        [str(part) for part in argv],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `pip install .` builds it, with the build tool that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("wheel")
    tool = _run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "hatchling"], folder)
    if tool.returncode != 0:
        pytest.skip("no package index within reach")
    (folder / "out").mkdir()
    built = _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "out", REPOSITORY], folder)
    assert built.returncode == 0, built.stderr
    (path,) = (folder / "out").glob("slipstream-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it; what it depends on is borrowed from ours, not our own source."""
    home = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    done = _run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel], home.parent
    )
    assert done.returncode == 0, done.stderr
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home


def test_the_wheel_holds_every_source_file_and_config(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for root in ("common", "services"):
        for path in (REPOSITORY / root).rglob("*"):
            if path.suffix in (".py", ".lua", ".toml", ".json"):
                assert path.relative_to(REPOSITORY / root).as_posix() in names
    for path in (REPOSITORY / "configs").glob("*.yaml"):
        assert f"slipstream/_configs/{path.name}" in names


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"slipstream"}
    assert "slipstream/__init__.py" not in names
    assert not [name for name in names if "test" in name or name.endswith(".pyc")]


def test_it_validates_a_packaged_config_by_name(installed: Path) -> None:
    done = _run([installed / "bin" / "slipstream", "validate", "smollm2-sums"], installed.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("smollm2-sums: ok; ")


def test_the_code_that_ran_was_the_wheels(installed: Path) -> None:
    code = (
        "import slipstream.cli.main as s, slipstream.config.load as c, slipstream.ledger.client as l\n"
        "print(s.__file__, c.find_config('tiny-sorter'), l.__file__, sep='\\n')"
    )
    done = _run([installed / "bin" / "python", "-c", code], installed.parent)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.split():
        assert Path(line).resolve().is_relative_to(installed.resolve())


def test_provenance_of_a_wheel_names_no_commit(installed: Path) -> None:
    """It lies in no repository of ours; its digest and version say what it is."""
    code = "import json; from slipstream.run.provenance import collect; print(json.dumps(collect()))"
    done = _run([installed / "bin" / "python", "-c", code], installed.parent)
    assert '"git": {"commit": null}' in done.stdout
    assert '"slipstream": "0.' in done.stdout


def test_the_ledgers_script_is_found(installed: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "print(len([f for f in files('slipstream.ledger').iterdir() if f.name.endswith('.lua')]))"
    )
    done = _run([installed / "bin" / "python", "-c", code], installed.parent)
    assert int(done.stdout) > 0, done.stderr
