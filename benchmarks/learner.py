"""The learner's step against plain forward and backward of the same model on the same tokens.

    python -m benchmarks.learner [--quick]

The limit is the faster of two plain ways without padding: each sequence by itself, and sequences packed into rows
by transformers. `padded` has every sequence as long as the longest. Lengths are log-normal; a pass of the learner
holds as many tokens as the longest sequence, as the plain ways do. Tokens a second count every sample with its whole
prompt, per CPU second of one thread, the optimizer's update left out everywhere; shares are medians over turns.
Memory is the peak of a process of its own over what it held before the model, with gradients and AdamW's moments in
both. Stalls are what the learner waits for when a version is published and a checkpoint is saved, over a step.
`shared prompt` is the gain where a group's prompt is long. The last line is JSON. --quick has a small model and two
turns; without it the model has the shape of SmolLM2-135M, and a run takes half an hour.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.learner_ways import GROUP_SIZE, LAST_STALL, WAYS, Job, save_model
from benchmarks.result import tell

SIGMAS = (0.5, 1.0)
LIMITS = ("one by one", "packed by transformers")
AIMS = {
    **{f"sigma{sigma}_share": ">= 0.9" for sigma in SIGMAS},
    **{f"sigma{sigma}_memory_ratio": "<= 1.1" for sigma in SIGMAS},
    "publish_share": "< 0.02",
    "checkpoint_share": "< 0.02",
}
CONTEXT = mp.get_context(
    "fork"
)  # nothing here has started a thread, and a spawned child would import for seconds
Times = list[dict[str, float]]


class Way:
    """One way in a process of its own; it works when asked."""

    def __init__(self, name: str, job: Job, folder: Path) -> None:
        self.name = name
        self.times: Times = []
        self.memory = 0
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(name, job, folder, theirs), daemon=True)
        self._process.start()
        self._pipe.recv()

    def step(self) -> None:
        """One step; its times and the peak so far are kept."""
        self._pipe.send(True)
        times, self.memory = self._pipe.recv()
        self.times.append(times)

    def close(self) -> None:
        """End the process."""
        self._pipe.send(False)
        self._process.join(60)
        self._process.kill()

    def per_turn(self, part: str) -> list[float]:
        """What a part took in each turn, CPU seconds."""
        return [times[part] for times in self.times]


def _serve(name: str, job: Job, folder: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    before = _resident("VmRSS")
    step = WAYS[name](job, folder)
    pipe.send(None)
    while pipe.recv():
        times = step()
        pipe.send((times, _resident("VmHWM") - before))


def _resident(name: str) -> int:
    """A figure of /proc/self/status in bytes; VmHWM is the peak."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")


def turns(names: Sequence[str], job: Job, folder: Path, count: int) -> dict[str, Way]:
    """Each way's steps, in turns."""
    with ExitStack() as stack:
        ways = {}
        for name in names:
            ways[name] = Way(name, job, folder)
            stack.callback(ways[name].close)
        for _ in range(count):
            for way in ways.values():
                way.step()
    return ways


def compare(job: Job, folder: Path, count: int, pad: bool = True) -> dict[str, float]:
    """The learner against its limits on one batch."""
    ways = turns(["learner", *LIMITS], job, folder, count)
    if pad:
        ways |= turns(["padded"], job, folder, 1)  # many times slower: once is enough
    tokens = job.tokens()
    seconds = {name: statistics.median(way.per_turn("pass")) for name, way in ways.items()}
    limit = min(LIMITS, key=lambda name: seconds[name])
    pairs = zip(ways[limit].per_turn("pass"), ways["learner"].per_turn("pass"), strict=True)
    print(
        f"\nsigma {job.sigma}, {job.samples} samples, {tokens} tokens, longest {job.longest()}, prompt {job.prompt}"
    )
    for name, way in ways.items():
        print(
            f"{name:24} {seconds[name]:8.2f} s {tokens / seconds[name]:8.0f} tokens/s {way.memory >> 20:6} MiB"
        )
    found = {
        "tokens_per_second": tokens / seconds["learner"],
        "share": statistics.median(plain / own for plain, own in pairs),
        "memory_ratio": ways["learner"].memory / min(ways[name].memory for name in LIMITS),
    }
    if pad:
        found["over_padded"] = seconds["padded"] / seconds["learner"]
    return found


def stalled(job: Job, folder: Path) -> dict[str, float]:
    """What publishing and saving hold up the learner, over a step."""
    way = turns(["stalls"], job, folder, LAST_STALL)["stalls"]
    step = statistics.median(way.per_turn("step"))
    parts = {name: statistics.median(way.per_turn(name)) for name in ("publish", "checkpoint")}
    print(f"\na step {step:.2f} s; " + ", ".join(f"{name} {value:.4f} s" for name, value in parts.items()))
    return {f"{name}_share": value / step for name, value in parts.items()}


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, fewer tokens, two turns")
    quick = parser.parse_args().quick
    size, mean, samples, count = ("small", 96, 16, 2) if quick else ("smollm2-135m", 192, 64, 3)
    base = Job(size=size, sigma=SIGMAS[0], mean=mean, samples=samples, prompt=16)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        maker = CONTEXT.Process(target=save_model, args=(size, folder))
        maker.start()
        maker.join()
        for sigma in SIGMAS:
            found = compare(replace(base, sigma=sigma), folder, count)
            figures |= {f"sigma{sigma}_{name}": value for name, value in found.items()}
        shared = compare(replace(base, mean=32, samples=GROUP_SIZE, prompt=192), folder, 1, pad=False)
        figures["shared_prompt_gain"] = shared["share"]
        figures |= stalled(replace(base, samples=2 * samples), folder)
    figures = {name: round(value, 4) for name, value in figures.items()}
    tell("learner", figures, AIMS, quick=quick)


if __name__ == "__main__":
    main()
