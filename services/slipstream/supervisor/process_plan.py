"""Which processes `up` starts for a config, and with what environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.secrets import hand_over
from slipstream.supervisor.child import ProcessSpec

STREAM_FROM = "glibc.cpu.x86_non_temporal_threshold=0x40000"


def fetch_spec(config: Config) -> ProcessSpec:
    """The process that brings the model into the cache before any role asks for it."""
    return ProcessSpec("fetch", [*_slipstream(), "fetch", config.model.source], _environment(1))


def role_specs(
    config: Config, config_file: Path, redis_url: str, log_format: str, keys: Path
) -> list[ProcessSpec]:
    """Every role's processes. The learner comes first: it opens the run that the others wait for."""
    counts = {
        "learner": 1,
        "buffer": config.buffer.shards,
        "reward": config.reward.replicas,
        "rollout": config.rollout.replicas,
    }
    threads = {"learner": config.learner.threads, "rollout": config.rollout.engine.threads}
    secrets, descriptors = hand_over(os.environ)
    specs = []
    for role, count in counts.items():
        env = _environment(threads.get(role, 1)) | secrets
        env |= {
            "SLIPSTREAM__TELEMETRY__LOG_FORMAT": log_format,
            "SLIPSTREAM__REDIS__URL": redis_url,
            "SLIPSTREAM__NETWORK__KEYS": config.network.keys or str(keys.resolve()),
        }
        if role == "learner":
            env |= _streaming_stores()
        for index in range(count):
            name = f"{role}-{index}" if count > 1 or role in ("rollout", "reward") else role
            argv = [*_slipstream(), "run", role, "--config", str(config_file), "--name", name]
            specs.append(ProcessSpec(name, argv, env, keep=descriptors))
    return specs


def _slipstream() -> list[str]:
    """Without the working folder on the path (-P): a file called queue.py there is not the library's."""
    return [sys.executable, "-P", "-m", "slipstream.cli.main"]


def _streaming_stores() -> dict[str, str]:
    """Copies of 256 KiB and more write past the cache: publishing then costs a third less.

    That is also what the C library does on most machines, from about its share of the last cache on; where a virtual
    machine reports hundreds of MiB of it, it never does. What the user has set stays.
    """
    own = os.environ.get("GLIBC_TUNABLES", "")
    return {} if STREAM_FROM.partition("=")[0] in own else {"GLIBC_TUNABLES": f"{own}:{STREAM_FROM}".strip(":")}


def _environment(threads: int) -> dict[str, str]:
    """One thread per process by default: two OpenMP teams on one core spend their time waiting for each other."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
