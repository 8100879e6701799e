"""The processes and what they lean on: rollout, reward, buffer, learner, weights, ledger, supervisor."""

from __future__ import annotations

from typing import Any, Literal

from slipstream.conditions import like, unless, when
from slipstream.config.base import Section, setting, sub
from slipstream.config.sections.checkpoint_config import CheckpointSection
from slipstream.config.sections.governor_config import GovernorSection
from slipstream.config.sections.lora_config import LoraSection
from slipstream.config.sections.parallel_config import ParallelSection
from slipstream.config.sections.precision_config import PrecisionSection
from slipstream.config.sections.steps_config import OptimizerSection, ReferenceSection
from slipstream.staleness import Policy

_WORKED = r".*:.*|math|python|reasoning_gym|regex"  # what runs in killable processes
_WORKER = like("use", _WORKED, "a function of your own, or one of math, python, reasoning_gym, regex")
_OWN = like("use", ".*:.*", "a function of your own")
_WORKERS = like("reward.functions.*.use", _WORKED, "a function of your own, or one of math, python, …")
_QUOTA = unless("min_informative_groups", None) | unless("min_informative_frac", None)
_OTHERS = unless("network.host", "127.0.0.1", "localhost", "::1")  # who can be reached from other hosts
_LINKS = when("transport", "tcp", "ucx", "nccl") | when("transport", "auto") & _OTHERS


class StalenessSection(Section):
    """How far generators may lag behind the learner."""

    policy: Policy = setting("token", "what happens around the bound: pace, drop, wait or token")
    max_staleness: int = setting(4, "the bound (eta) on a token's age, in versions", ge=0)
    oversampling: float = setting(1.0, "factor on the groups admitted at once", ge=1.0)


class EngineSection(Section):
    """What generates the tokens of a rollout replica."""

    kind: Literal["transformers", "simulated", "vllm", "http"] = setting("transformers", "engine to use")
    max_sequences: int = setting(64, "sequences decoded at once in a replica", ge=1)
    threads: int = setting(1, "CPU threads of the engine", acts=unless("kind", "http", "simulated"), ge=1)
    options: dict[str, Any] = setting({}, "further options of the engine, by its own names")

    @property
    def by_file_names(self) -> bool:
        """Whether it takes a version's weights by the names that the model's files have for them."""
        return self.kind in ("vllm", "http") and not self.options.get("fixed_weights")


class RolloutSection(Section):
    """Generator replicas."""

    replicas: int = setting(1, "rollout processes that `up` starts", ge=1)
    engine: EngineSection = sub(EngineSection, "the engine of each replica")
    express: int = setting(
        0,
        "replicas that only go on with what takes longest in the others, which they do faster; 0: none",
        acts=unless("replicas", 1),
        ge=0,
    )
    express_sequences: int = setting(
        8, "sequences decoded at once in such a replica", acts=unless("express", 0), ge=1
    )
    ticket_seconds: float = setting(600.0, "deadline of one group; after it the group is tried again", gt=0)
    attempts: int = setting(3, "tries per group before it is listed as failed", ge=1)
    handover_mb: int = setting(
        64, "unfinished groups of replicas that stop, kept in the ledger for others to go on with, MiB", ge=0
    )


class RewardFunction(Section):
    """One reward: a registered name, `package.module:function` or `file.py:function`."""

    use: str = setting("last_number", "registered name, dotted path or file path of the scorer")
    name: str | None = setting(None, "name of the component; null takes the scorer's")
    weight: float = setting(1.0, "weight in the sum of rewards")
    weights: dict[str, float] = setting(
        {},
        "weights of the parts of a dict that it returns, whose sum counts then; a part that is not given counts 1, "
        "one that never appears is refused. Without weights the dict's `score` or `reward` counts",
        acts=_OWN,
    )
    options: dict[str, Any] = setting({}, "options of the scorer, by its own names")
    timeout_seconds: float = setting(10.0, "time limit for one call, seconds", acts=_WORKER, gt=0)
    memory_mb: int = setting(512, "memory limit of its worker process, MiB", acts=_WORKER, ge=64)
    on_timeout: Literal["unscored", "zero"] | None = setting(
        None, "what a call over its time limit gives; null leaves it to the scorer", acts=_WORKER
    )

    completions: Literal["auto", "text", "messages"] = setting(
        "auto",
        "what a function gets as completions: auto gives a batch function messages, as TRL does, where the rows' "
        "prompts are messages, else texts; the one-sample form gets messages only where they are asked for",
        acts=_OWN,
    )

    @property
    def component(self) -> str:
        """What the reward is called in records: its name, else the scorer's."""
        return self.name or self.use.rpartition(":")[2]


class RewardSection(Section):
    """Scoring."""

    replicas: int = setting(1, "reward processes that `up` starts", ge=1)
    functions: list[RewardFunction] = setting([], "the rewards whose weighted sum is trained on")
    sandbox: Literal["auto", "required"] = setting(
        "auto",
        "what holds code from the model: auto takes bubblewrap or else what there is, and says so; required starts "
        "with bubblewrap or not at all",
        acts=like("reward.functions.*.use", "python", "python"),
    )
    workers: int = setting(1, "killable worker processes per replica for user code", acts=_WORKERS, ge=1)
    max_unscored_share: float = setting(
        0.5, "stop the run when more than this share of the last window is unscored", ge=0.0, le=1.0
    )
    unscored_window: int = setting(200, "samples in that window", acts=unless("max_unscored_share", 1.0), ge=1)


class BufferSection(Section):
    """The durable store of scored groups."""

    shards: int = setting(1, "buffer processes; a ticket's number says which one holds its group", ge=1)
    order: str = setting(
        "fifo",
        "which group is next: fifo, freshest, oldest_first, random, or a function of the stored groups and the "
        "step that returns tickets, as package.module:function or file.py:function",
    )
    reuse: int = setting(1, "steps that train on each group; at most staleness.max_staleness + 1", ge=1)
    max_groups: int | None = setting(
        None, "most open groups; null leaves it to staleness. What is over the bound is not begun", ge=1
    )
    max_mb: int | None = setting(
        None,
        "most MiB of stored groups that wait for a step; null is unbounded. Less is begun, none is dropped",
        ge=1,
    )
    sync: bool = setting(
        True,
        "fsync before a group is acknowledged; without, a power cut costs the newest, which are rolled out anew",
    )
    min_informative_groups: int | None = setting(
        None, "least groups of a step whose rewards differ; others beyond are dropped and replaced", ge=1
    )
    min_informative_frac: float | None = setting(
        None, "the same as a share of batch.groups, rounded up", gt=0.0, le=1.0
    )
    refill_groups: int = setting(
        512, "groups without signal that may be dropped for one step", acts=_QUOTA, ge=1
    )
    refill_spent: Literal["raise", "proceed"] = setting(
        "raise",
        "when so many were: raise stops the run, proceed trains on what is there",
        acts=_QUOTA,
    )


class LearnerSection(Section):
    """The training process."""

    optimizer: OptimizerSection = sub(OptimizerSection, "the optimizer")
    checkpoint: CheckpointSection = sub(CheckpointSection, "checkpoints")
    parallel: ParallelSection = sub(ParallelSection, "several ranks")
    precision: PrecisionSection = sub(PrecisionSection, "dtypes")
    governor: GovernorSection = sub(GovernorSection, "reaction to a small effective sample size")
    lora: LoraSection = sub(LoraSection, "low-rank adapters instead of all weights")
    start_from: str | None = setting(
        None,
        "begin a new run with the weights of another run's newest checkpoint, or of one checkpoint: its folder; `up` "
        "writes down which checkpoint that is and keeps to it; optimizer and counts start anew",
    )
    reference: ReferenceSection = sub(ReferenceSection, "the model that the KL is measured to")
    freeze: list[str] = setting([], "patterns over the names of parameters that are not trained")
    n_mini: int = setting(
        1, "optimizer steps per batch, each on its part of the groups; divides batch.groups", ge=1
    )
    micro_batch_tokens: int = setting(4096, "tokens per forward pass; changes memory only", ge=16)
    activations: Literal["keep", "selective", "full"] = setting(
        "keep",
        "what a pass keeps for its backward: everything, matrix products and attention alone, or each block's input; "
        "the rest is computed again; changes memory only",
    )
    compile: bool = setting(False, "torch.compile the blocks; changes speed, and the rounding")
    threads: int = setting(1, "CPU threads of the learner", ge=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    max_nonfinite_steps: int = setting(
        3, "stop after this many batches in a row without an update, for a gradient that is not finite", ge=1
    )
    max_idle_batches: int | None = setting(
        None,
        "stop when so many batches' worth of groups were dropped for one step because nothing in them moves the "
        "weights: rewards all equal, unscored, masked or empty; null is 20, and of small batches as many as hold "
        "512 groups",
        ge=1,
    )
    take_timeout_seconds: float = setting(
        900.0, "stop when no batch could be filled for this long, seconds", gt=0
    )


class WeightsSection(Section):
    """How weights reach the generators."""

    transport: Literal["auto", "shm", "tcp", "ucx", "file", "nccl"] = setting(
        "auto",
        "auto takes shm on the learner's host and the best link to others; a name forces that one (nccl is "
        "experimental: no machine here could run it)",
    )
    allow_unencrypted: bool = setting(
        False,
        "auto may take ucx between hosts although the run has a key: requests are encrypted, the weights are not",
        acts=when("transport", "auto") & _OTHERS,
    )
    host: str | None = setting(None, "name of this host among those of the run; null takes its host name")
    port: int = setting(
        0,
        "port of the learner's first link, the next link takes the next; 0 takes free ones",
        acts=_LINKS,
        ge=0,
        le=65535,
    )
    folder: str | None = setting(
        None,
        "folder or fsspec URL that all hosts see, for the file transport",
        acts=when("transport", "auto", "file"),
    )
    delta: bool = setting(
        False,
        "send what changed where that is smaller (16-bit weights, slow links)",
        acts=_LINKS | when("transport", "file") | when("transport", "auto") & unless("folder", None),
    )
    dense_every: int = setting(25, "send every k-th version whole", acts=when("delta", True), ge=1)
    frame_seconds: float = setting(
        10.0,
        "deadline for each 8 MiB of a transfer, seconds; no weights at all for 3 of these ends the run",
        gt=0,
    )
    canary_bound: float | None = setting(
        0.1,
        "largest difference of a replica's logprobs from the learner's on fixed prompts after a swap; null is off",
        acts=unless("rollout.engine.kind", "simulated"),
        gt=0,
    )
    keep_seconds: float = setting(
        120.0,
        "a version that a live replica still wants is kept at most so long after its successor, seconds",
        gt=0,
    )


class RedisSection(Section):
    """The server that keeps the ledger. Its password comes from the environment: see `slipstream.secrets`."""

    url: str | None = setting(None, "redis://host:port/db or unix:///path; null starts an embedded Valkey")


class NetworkSection(Section):
    """Sockets."""

    host: str = setting("127.0.0.1", "address that services bind; 0.0.0.0 is every one of the host's")
    advertise: str | None = setting(
        None,
        "host name or address that others reach this process at; null is host, or of 0.0.0.0 this host's own",
    )
    port: int = setting(
        0, "port of the role's data socket when started alone; 0 takes a free one", ge=0, le=65535
    )
    metrics_port: int = setting(0, "port of the role's /metrics; 0 takes a free one", ge=0, le=65535)
    credits: int = setting(16, "unacknowledged groups per sender", ge=1)
    keys: str | None = setting(
        None,
        "folder of the run's CURVE key, from `slipstream keys`; null: `up` makes one, a role alone has none and "
        "its sockets are open to whoever reaches them",
    )


class SupervisorSection(Section):
    """How `slipstream up` treats its processes."""

    restarts: int = setting(5, "restarts allowed per process within the window", ge=0)
    window_seconds: float = setting(300.0, "window of the restart limit, seconds", gt=0)
    backoff_seconds: float = setting(0.5, "first pause before a restart, doubled each time, seconds", gt=0)
    drain_seconds: float = setting(4.0, "time between SIGTERM and SIGKILL, seconds", gt=0)
