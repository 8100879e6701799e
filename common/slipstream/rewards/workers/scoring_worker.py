"""A worker process: `python -m slipstream.rewards.workers.scoring_worker FD` loads a scorer and answers on socket FD.

It knows no time limits of its own: the pool kills it. It imports nothing but what its scorer needs.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec

from slipstream.errors import UserError
from slipstream.rewards import functions
from slipstream.rewards import reward_registry as registry
from slipstream.rewards.apart.keeper import keep
from slipstream.rewards.base import Completions, MissingColumn, Outcome, Task, fault_of
from slipstream.rewards.outcomes import batch_outcomes, outcome_of
from slipstream.rewards.workers import limits
from slipstream.rewards.workers.worker_wire import Ready, ScoreJob, ScoreReply, Setup, pack, read_frame


class Logged:
    """What a batch function is handed beside columns, as TRL does, and the metrics that it logs."""

    def __init__(self) -> None:
        self._metrics: dict[str, float | None] = {}

    def extras(self, job: ScoreJob) -> dict[str, Any]:
        """By the names of `functions.EXTRAS`."""
        return {
            "completion_ids": job.beside.ids,
            "trainer_state": SimpleNamespace(**job.beside.state),
            "log_metric": self._log,
        }

    def _log(self, name: str, value: Any) -> None:
        self._metrics[str(name)] = None if value is None else float(value)

    def added(self, outcome: Outcome) -> Outcome:
        """An outcome with the metrics that were logged in its call."""
        if not self._metrics:
            return outcome
        return msgspec.structs.replace(outcome, metrics={**self._metrics, **outcome.metrics})


class Target(Protocol):
    """A loaded scorer."""

    ready: Ready

    def score(self, job: ScoreJob) -> list[Outcome]:
        """One outcome per completion; never raises an `Exception`."""
        ...


class BuiltinTarget:
    """A built-in scorer that runs in a worker."""

    def __init__(self, setup: Setup) -> None:
        self.ready = _behind_walls(setup) if setup.isolated else Ready()
        self._scorer = registry.build(setup.use, setup.options)
        getattr(self._scorer, "prepare", lambda: None)()

    def score(self, job: ScoreJob) -> list[Outcome]:
        """See `Target`."""
        task = Task(job.prompt, job.columns)
        return [guarded(self._scorer.pooled, completion, task) for completion in job.completions]


class FunctionTarget:
    """A user's function of either form, sync or async."""

    def __init__(self, setup: Setup) -> None:
        function = functions.load_function(setup.use)
        self._form = functions.recognise_form(function)
        functions.check_options(function, setup.options)
        self._is_async = functions.is_async(function)
        self._takes_all = functions.takes_all(function)
        partial = functools.partial(function, **setup.options)
        self._function = functions.adapted(partial)
        self._weighed = setup.weighed
        self._completions = _completions(setup, foreign=self._function is not partial)
        self._runner: Any = None
        self._timeout_seconds = setup.timeout_seconds
        self.ready = Ready(
            form=self._form,
            whole_group=self._form == "batch" or self._is_async,
            needs=functions.needed_columns(self._function, self._form),
            asks_more=self._form == "batch" and functions.asks_more(self._function),
            by_row=self._form == "batch" and self._completions == "auto",
        )

    def score(self, job: ScoreJob) -> list[Outcome]:
        """See `Target`."""
        if self._form == "batch":
            return self._score_batch(job)
        task = Task(job.prompt, job.columns)
        if self._is_async:
            result: list[Outcome] = self._run(self._score_together(task, job))
            return result
        return [self._guarded(completion, task, job) for completion in job.completions]

    def _guarded(self, completion: str, task: Task, job: ScoreJob) -> Outcome:
        try:
            return outcome_of(self._score_one(completion, task), self._weighed)
        except Exception as error:  # noqa: BLE001  (user code)
            return self._explained(fault_of(error), error, job)

    def _score_batch(self, job: ScoreJob) -> list[Outcome]:
        count, logged = len(job.completions), Logged()
        try:
            arguments = functions.batch_arguments(
                self._function, job.prompt, job.completions, job.columns, logged.extras(job), self._completions
            )
            result = self._function(**arguments)
            if hasattr(result, "__await__"):
                result = self._run(_awaited(result))
            return [logged.added(outcome) for outcome in batch_outcomes(result, count, self._weighed)]
        except Exception as error:  # noqa: BLE001  (user code)
            return [self._explained(fault_of(error), error, job)] * count

    def _explained(self, fault: Outcome, error: Exception, job: ScoreJob) -> Outcome:
        """The fault with what to change, where its kind suggests that the function expects something else."""
        hint = ""
        if isinstance(error, KeyError) and self._takes_all and not isinstance(error, MissingColumn):
            hint = f"the row's columns are {', '.join(job.columns) or 'none'}"
        elif isinstance(error, TypeError | AttributeError):
            messages = (
                functions.takes_messages(job.columns, self._completions)
                if self._form == "batch"
                else self._completions == "messages"
            )
            hint = _other_kind(str(error), messages)
        return msgspec.structs.replace(fault, detail=f"{fault.detail}; {hint}") if hint else fault

    def _arguments(self, completion: str, task: Task) -> dict[str, Any]:
        return functions.sample_arguments(self._function, completion, task, self._completions)

    def _score_one(self, completion: str, task: Task) -> Any:
        result = self._function(**self._arguments(completion, task))
        return self._run(_awaited(result)) if hasattr(result, "__await__") else result

    async def _score_together(self, task: Task, job: ScoreJob) -> list[Outcome]:
        import asyncio

        return await asyncio.gather(*(self._score_one_async(each, task, job) for each in job.completions))

    async def _score_one_async(self, completion: str, task: Task, job: ScoreJob) -> Outcome:
        import asyncio

        try:
            async with asyncio.timeout(self._timeout_seconds) as limit:
                return outcome_of(await self._function(**self._arguments(completion, task)), self._weighed)
        except Exception as error:  # noqa: BLE001  (user code)
            if limit.expired():
                return Outcome(status="timeout", detail=f"took more than {self._timeout_seconds:g} s")
            return self._explained(fault_of(error), error, job)

    def _run(self, coroutine: Any) -> Any:
        """Run on one loop for the process's life, so that a client made in one call serves the next."""
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)


def main() -> None:
    """Load the scorer that the pool names, then answer its jobs until it hangs up."""
    keep()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)  # what a scorer starts has no part in it
    stream = channel.makefile("rb")
    setup = read_frame(stream, Setup)
    if setup is None:
        return
    target = _load(setup, channel.sendall)
    if target is None:
        return
    if setup.isolated:
        limits.hide()
    channel.sendall(pack(msgspec.structs.replace(target.ready, pid=os.getpid())))
    while (job := read_frame(stream, ScoreJob)) is not None:
        reply = ScoreReply(number=job.number, outcomes=target.score(job))
        _let_go()
        sys.stdout.flush()
        channel.sendall(pack(reply))
        if any(outcome.status == "memory" for outcome in reply.outcomes):
            return


def _let_go() -> None:
    """Free what a function's own processes shared with it by name: this process is killed in the end, and names in
    /dev/shm would stay."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None and getattr(tracker._resource_tracker, "_fd", None) is not None:
        gc.collect()


def guarded(score: Callable[[str, Task], Any], completion: str, task: Task) -> Outcome:
    """Outcome of one call; what it raises becomes a status."""
    try:
        return outcome_of(score(completion, task))
    except Exception as error:  # noqa: BLE001  (user code)
        return fault_of(error)


def _load(setup: Setup, send: Callable[[bytes], None]) -> Target | None:
    """The scorer under its memory limit, or None after the pool was told why there is none."""
    try:
        limits.limit_memory(setup.memory_bytes)
        return FunctionTarget(setup) if ":" in setup.use else BuiltinTarget(setup)
    except UserError as error:
        send(pack(Ready(problem=error.problem, mend=error.mend)))
    except MemoryError:
        size = f"{setup.memory_bytes >> 20} MiB"
        send(
            pack(
                Ready(
                    problem=f"scorer {setup.use!r} doesn't fit into memory_mb: {size}",
                    mend="raise memory_mb; torch needs 8192 or more",
                )
            )
        )
    return None


def _completions(setup: Setup, foreign: bool) -> Completions:
    """What a function gets as completions: those of other projects have texts, whatever the row's prompt is.

    Raises:
        UserError: Messages are asked for where texts are the form.
    """
    if not foreign:
        return setup.completions
    if setup.completions == "messages":
        raise UserError(
            "completions: messages, but the reward function is of verl's or OpenRLHF's form, which takes texts",
            "take it out",
        )
    return "text"


def _other_kind(error: str, messages: bool) -> str:
    """What to change where an error reads as if a text had been taken for messages, or the other way round."""
    if messages and ("'list'" in error or "'dict'" in error or '"list"' in error or '"dict"' in error):
        return (
            "completions are lists of messages here, as in TRL, for the row's prompt is; set the reward's "
            "`completions: text` for texts"
        )
    if not messages and ("'str'" in error or "string ind" in error):
        return "completions are texts here; set the reward's `completions: messages` for lists of messages"
    return ""


def _behind_walls(setup: Setup) -> Ready:
    """See what holds a model's programs here.

    Raises:
        UserError: Less than must.
    """
    from slipstream.rewards.apart import trial

    if setup.sandbox == "required":
        trial.demand_full()
    return Ready(holds=trial.held().line, lasting=trial.held().full)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


if __name__ == "__main__":
    main()
    # A scorer's threads and exit handlers must not keep the process.
    sys.stdout.flush()
    os._exit(0)
