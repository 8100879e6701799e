"""Our UCX rows for `benchmarks.weights`, in an environment with UCXX: `-m benchmarks.weights_ucx MIB ROUNDS`."""

from __future__ import annotations

import json
import sys
from dataclasses import astuple

import numpy as np

from slipstream.weights.bench import measure


def main() -> None:
    """Print the rounds to one and to three receivers as JSON."""
    data = np.random.default_rng(0).random((int(sys.argv[1]) << 8, 1024), np.float32)
    found = {
        receivers: [
            [memcpy, *astuple(each)] for memcpy, each in measure("ucx", receivers, data, int(sys.argv[2]))
        ]
        for receivers in (1, 3)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
