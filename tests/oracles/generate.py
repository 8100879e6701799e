"""Make the golden vectors of tests/algo/test_oracles.py anew: `python tests/oracles/generate.py`.

Draws the inputs (NumPy, seeded), makes one throw-away environment per package, pinned, and runs `from_trl.py`
and `from_verl.py` there on the CPU. What they write, with the versions they ran with, goes to
tests/data/oracles/. With `--trl` or `--verl` an environment that exists already is used: give its Python.
Needs NumPy; takes a few minutes and some GB on disk, most of it for PyTorch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import venv
from pathlib import Path

import inputs
import numpy as np

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "data" / "oracles"
TORCH = "torch==2.13.0"
PACKAGES: dict[str, list[list[str]]] = {
    "trl": [[TORCH, "numpy", "trl==1.16.0"]],
    # verl's full requirements hold ray, wandb and more that its formulas do not use: see from_verl.py
    "verl": [
        [TORCH, "numpy", "transformers>=5.5.3,<5.11,!=5.6.0", "tensordict==0.10.0", "omegaconf", "hydra-core"],
        ["datasets", "peft", "accelerate", "codetiming", "cloudpickle", "pandas", "dill", "psutil"],
        ["--no-deps", "verl==0.9.1"],
    ],
}


def main() -> None:
    """Draw the inputs, then run both packages on them."""
    parser = argparse.ArgumentParser(description=__doc__)
    for package in PACKAGES:
        parser.add_argument(f"--{package}", metavar="PYTHON", help=f"Python of an environment with {package}")
    given = vars(parser.parse_args())
    TARGET.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(TARGET / "inputs.npz", **inputs.make())
    for package in PACKAGES:
        with tempfile.TemporaryDirectory(prefix=f"oracle-{package}-") as folder:
            python = given[package] or environment(package, Path(folder))
            script, target = HERE / f"from_{package}.py", TARGET / f"{package}.npz"
            run([python, str(script), str(TARGET / "inputs.npz"), str(target)])


def environment(package: str, folder: Path) -> str:
    """Python of a new environment with the pinned package."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    for requirements in PACKAGES[package]:
        run([python, "-m", "pip", "install", "--quiet", *requirements])
    return python


def run(command: list[str]) -> None:
    """Run and wait; a failure ends the whole script. One thread, so that sums have one order."""
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=3600)


if __name__ == "__main__":
    main()
