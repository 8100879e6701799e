"""CURVE keys: made, kept in a text file that only its owner can read, and read again.

A run has one key pair, and each of its processes holds it: as a server's key, as a client's, and as the only key that
is let in. Whoever has not got it gets nothing and changes nothing.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from slipstream.errors import UserError

FILE = "curve.key"
HEADER = "# slipstream CURVE key pair (Z85); whoever has the secret line can join the run"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair as Z85 text of 40 characters each; the secret is left out of `repr`."""

    public: str
    secret: str = field(repr=False)


def generate() -> KeyPair:
    """A new random key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def make(folder: Path) -> Path:
    """Make a run's key in a folder, and the folder if need be; returns the file.

    Raises:
        UserError: A key is there already, or the folder cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        save(folder / FILE, generate())
    except OSError as error:
        raise UserError(
            f"{folder}: no key can be made ({error.strerror})", "choose a writable folder"
        ) from None
    return folder / FILE


def keys_of(folder: str | None) -> KeyPair | None:
    """The run's key in the folder that `network.keys` names; None when it names none.

    Raises:
        UserError: No usable key is there.
    """
    return None if folder is None else load(Path(folder) / FILE)


def save(path: Path, keys: KeyPair) -> None:
    """Write a key pair to a new file of mode 0600; raises `UserError` when the file exists."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path}: a key file exists", "remove it first, or keep using it") from None
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"{HEADER}\npublic: {keys.public}\nsecret: {keys.secret}\n")


def load(path: Path) -> KeyPair:
    """Read a key pair.

    Raises:
        UserError: Missing or readable by everyone, not a key file, or the two keys are no pair.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII"
        mend = f"make one with `slipstream keys {path.parent}`, or change network.keys"
        raise UserError(f"{path}: no readable key file ({reason})", mend) from None
    if stat.S_IMODE(mode) & 0o007:
        raise UserError(f"{path}: mode {stat.S_IMODE(mode):04o} lets everyone read it", f"chmod 600 {path}")
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line and line[0] != "#")
    keys = KeyPair(fields.get("public", ""), fields.get("secret", ""))
    if not is_key(keys.public) or not is_key(keys.secret) or _public_of(keys.secret) != keys.public:
        raise UserError(f"{path}: holds no CURVE key pair", "make one with `slipstream keys`")
    return keys


def is_key(text: str) -> bool:
    """Whether a text is a Z85 key of 32 bytes."""
    try:
        return len(text) == 40 and len(z85.decode(text.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeEncodeError, OverflowError):
        return False


def _public_of(secret: str) -> str:
    return zmq.curve_public(secret.encode()).decode()
