"""`python -m slipstream.telemetry.probe [PATH]`: a health check that asks the role's own page on its own port.

Standard library alone, so that a look costs a tenth of a second. Exit code 0 when the answer is 200.
"""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping

PORT = "SLIPSTREAM__NETWORK__METRICS_PORT"
HOST = "SLIPSTREAM__NETWORK__HOST"
_OWN = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "[::1]"}
SECONDS = 3.0
_LONGEST = 500


def probe(path: str, environment: Mapping[str, str]) -> tuple[bool, str]:
    """Whether the role answers 200 on a path of its metrics port, and what it said in one line.

    Without a port there is nothing to ask, as in a container that runs a tool.
    """
    port = environment.get(PORT, "")
    if port in ("", "0"):
        return True, f"{PORT} is not set: nothing to ask"
    bound = environment.get(HOST, "")
    host = _OWN.get(bound, f"[{bound}]" if ":" in bound else bound)
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=SECONDS) as answer:
            return True, _line(path, answer.read(_LONGEST))
    except urllib.error.HTTPError as error:
        return False, f"{error.code} {_line(path, error.read(_LONGEST))}"
    except (OSError, http.client.HTTPException) as error:
        return False, f"port {port} ({PORT}): {getattr(error, 'reason', error)}"


def _line(path: str, body: bytes) -> str:
    return f"{path}: {' '.join(body.decode(errors='replace').split())[:200]}"


if __name__ == "__main__":
    healthy, said = probe(sys.argv[1] if len(sys.argv) > 1 else "/readyz", os.environ)
    print(said)  # noqa: T201
    sys.exit(not healthy)
