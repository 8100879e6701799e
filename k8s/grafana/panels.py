"""What the dashboards show, as plain values: rows of panels, each with its PromQL. No SDK here.

`$run` is a variable of every dashboard; `$__rate_interval` is Grafana's. Ledger metrics are shown by every buffer
shard, so they are taken as a maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

R = '{run=~"$run"}'


@dataclass(frozen=True)
class Panel:
    """One panel; `queries` are (legend, PromQL)."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"
    low: float | None = 0
    high: float | None = None
    stacked: bool = False


def p(title: str, *queries: tuple[str, str] | str, **options: object) -> Panel:
    """A panel; a query without a legend is shown under the panel's title."""
    pairs = tuple((title.lower(), each) if isinstance(each, str) else each for each in queries)
    return Panel(title, pairs, **options)  # type: ignore[arg-type]


def per_run(metric: str, how: str = "max", labels: str = "") -> str:
    """A level of the run, whoever shows it."""
    return f'{how} by (run{labels}) (slipstream_{metric}{{run=~"$run"}})'


def rate(metric: str, by: str = "", extra: str = "") -> str:
    """Per second, summed over processes."""
    return f'sum by (run{by}) (rate(slipstream_{metric}{{run=~"$run"{extra}}}[$__rate_interval]))'


BUSY = f"{rate('rollout_slot_seconds_total')} / {per_run('rollout_slots', 'sum')}"
WAITING = f"""{rate("learner_seconds_total", extra=', part="wait"')} / {rate("learner_seconds_total")}"""
LOAD = per_run("pipeline_bound_ratio", labels=", stage")
SHARE = {"unit": "percentunit", "high": 1}

REWARD = p("Reward", ("reward", per_run("learner_reward")), low=None, about="Mean reward of each step.")
EVALUATION = p(
    "Held-out reward",
    ("{{set}}", per_run("learner_evaluation_reward", labels=", set")),
    low=None,
    about="Greedy accuracy on held-out prompts; each point belongs to one version.",
)
SPEED = p(
    "Tokens a second",
    ("generated", rate("rollout_tokens_total")),
    ("trained", rate("learner_tokens_total")),
    about="Generated and not trained is waste or on its way.",
)
LOADS = p("Load of each stage", ("{{stage}}", LOAD), **SHARE, about="The largest load is what limits the run.")
AGE = p(
    "Age of the oldest tokens",
    ("mean", per_run("learner_age_mean_versions")),
    ("max", per_run("learner_age_max_versions")),
    ("bound", per_run("staleness_bound_versions")),
    about="In updates; what the bound means depends on staleness.policy.",
)
GROUPS = p(
    "Groups in the pipeline",
    *(
        (state, f'max by (run) (slipstream_ledger_groups{{run=~"$run", state="{state}"}})')
        for state in ("rolling", "scored", "buffered", "taken")
    ),
    ("cap", per_run("ledger_open_groups_cap")),
)
LIMIT = p(
    "Share of the speed limit",
    ("reached", per_run("pipeline_limit_ratio")),
    **SHARE,
    about="Of max(T_generate, T_train, T_sync): at 100 % the slowest stage never idles.",
)
EQUATION = p(
    "Ledger off by",
    ("groups", f"max by (run) (abs(slipstream_ledger_imbalance_groups{R}))"),
    ("tokens", f"max by (run) (abs(slipstream_ledger_imbalance_tokens{R}))"),
    kind="stat",
    about="Left less right side of the conservation equation; anything but 0 is a fault.",
)


def objective(title: str, *names: tuple[str, str], **options: object) -> Panel:
    """A panel of the objective's metrics by (legend, name)."""
    return p(title, *((legend, per_run(f"objective_{name}")) for legend, name in names), **options)


DASHBOARDS: dict[str, tuple[str, dict[str, list[Panel]]]] = {
    "overview": (
        "Overview",
        {"The eight things": [REWARD, EVALUATION, SPEED, LOADS, LIMIT, AGE, GROUPS, EQUATION]},
    ),
    "learning": (
        "Learning",
        {
            "Does it learn": [REWARD, EVALUATION],
            "Completions": [
                p("Length", ("mean", per_run("learner_response_tokens")), about="Completion tokens."),
                objective("Cut off", ("share", "truncated_ratio"), **SHARE),
                objective(
                    "Groups without a signal",
                    ("all equal", "zero_variance_ratio"),
                    ("all right", "all_right_ratio"),
                    ("all wrong", "all_wrong_ratio"),
                    **SHARE,
                ),
                objective("Entropy", ("nats a token", "entropy_nats")),
            ],
            "The step": [
                p("Gradient norm", per_run("learner_gradient_norm")),
                p("Learning rate", per_run("learner_learning_rate")),
                objective("Loss", ("loss", "loss"), low=None),
                p("Steps", ("made", per_run("learner_step")), ("durable", per_run("ledger_durable_step"))),
            ],
        },
    ),
    "off-policy": (
        "Off-policy health",
        {
            "Age": [
                AGE,
                p(
                    "Tokens by age",
                    ("{{age}}", per_run("objective_trained_tokens_by_age", labels=", age")),
                    stacked=True,
                ),
                p(
                    "Over the bound",
                    ("groups", per_run("learner_over_bound_groups_ratio")),
                    ("tokens", per_run("learner_over_bound_tokens_ratio")),
                    ("masked for age", per_run("objective_masked_age_ratio")),
                    **SHARE,
                ),
                p(
                    "Length bias",
                    (
                        "trained over sampled",
                        f"({rate('learner_tokens_total')} / {rate('learner_samples_total')}) / "
                        f"({rate('rollout_sample_tokens_sum')} / {rate('rollout_sample_tokens_count')})",
                    ),
                    about="Mean length of what is trained over what is sampled; under 1, short answers are favoured.",
                ),
            ],
            "Sampler against learner": [
                objective("Effective sample size", ("tokens", "effective_tokens_ratio"), **SHARE),
                objective("Mismatch", ("k1", "mismatch_k1_nats"), ("k3", "mismatch_k3_nats"), low=None),
                objective("Ratio", ("mean", "policy_ratio_mean"), ("max", "policy_ratio_max")),
                objective(
                    "Clipped and masked",
                    ("above", "clip_high_ratio"),
                    ("below", "clip_low_ratio"),
                    ("no weight", "masked_ratio"),
                    **SHARE,
                ),
            ],
        },
    ),
    "throughput": (
        "Throughput and bottleneck",
        {
            "What limits it": [LOADS, LIMIT, SPEED],
            "Seconds": [
                p(
                    "A step by stage",
                    ("{{stage}}", per_run("pipeline_stage_seconds", labels=", stage")),
                    unit="s",
                ),
                p(
                    "The learner's time",
                    ("{{part}}", rate("learner_seconds_total", ", part")),
                    unit="percentunit",
                    stacked=True,
                ),
                p(
                    "Time to sample a group",
                    *(
                        (f"p{q}", f"histogram_quantile(0.{q}, {rate('rollout_group_seconds_bucket', ', le')})")
                        for q in (50, 95)
                    ),
                    unit="s",
                ),
                p(
                    "Imbalance of the learner's ranks",
                    ("busiest over mean", per_run("learner_imbalance_ratio")),
                    **SHARE,
                    about="Less 1: the time that the other ranks wait for the busiest, as a share of their work.",
                ),
            ],
            "Idle": [
                p("Generators' slots in use", ("in use", BUSY), **SHARE),
                p("Learner waiting", ("waiting", WAITING), **SHARE),
                GROUPS,
            ],
            "Queues": [
                p("Credits", ("{{process}} to {{to}}", f"slipstream_link_credits{R}")),
                p("Parcels waiting", ("{{process}} to {{to}}", f"slipstream_link_waiting_parcels{R}")),
                p("Unread", ("{{process}}", f"slipstream_inbox_unread_parcels{R}")),
            ],
            "Cost": [
                p(
                    "CPU seconds a trained token",
                    (
                        "all processes",
                        f"sum by (run) (rate(process_cpu_seconds_total{R}[$__rate_interval])) / "
                        f"{rate('learner_tokens_total')}",
                    ),
                    unit="s",
                ),
                p(
                    "GPU seconds a trained token",
                    ("all processes", f"{per_run('gpus', 'sum')} / {rate('learner_tokens_total')}"),
                    unit="s",
                    about="0 without GPUs.",
                ),
            ],
        },
    ),
    "rewards": (
        "Rewards",
        {
            "Rewards": [
                REWARD,
                p(
                    "By component",
                    ("{{component}}", per_run("learner_reward_component", labels=", component")),
                    low=None,
                ),
            ],
            "Scoring": [
                p("Samples scored a second", rate("reward_samples_total")),
                p(
                    "Time to score a group",
                    *(
                        (f"p{q}", f"histogram_quantile(0.{q}, {rate('reward_group_seconds_bucket', ', le')})")
                        for q in (50, 95)
                    ),
                    unit="s",
                ),
                p("Being scored", ("{{process}}", f"slipstream_reward_groups_in_hand{R}")),
                p(
                    "Not scored",
                    (
                        "{{reason}}",
                        f"{rate('reward_unscored_total', ', reason')} or {per_run('learner_step')} * 0",
                    ),
                    about="By reason, a second; these leave their group and are never a 0.",
                ),
            ],
        },
    ),
    "weights": (
        "Weights",
        {
            "Versions": [
                p(
                    "Versions",
                    ("learner", per_run("ledger_version")),
                    ("{{replica}}", per_run("replica_version", labels=", replica")),
                ),
                p("Behind", ("{{replica}}", per_run("replica_lag_versions", labels=", replica"))),
                p("Spread over replicas", per_run("replica_spread_versions")),
            ],
            "Transfers": [
                p("Size of a version", per_run("weights_version_bytes"), unit="bytes"),
                p(
                    "To be fetched of it",
                    ("share", per_run("weights_delta_ratio")),
                    **SHARE,
                    about="1 without deltas.",
                ),
                p("Fetched", ("{{process}}", rate("weights_fetched_bytes_total", ", process")), unit="Bps"),
                p(
                    "Time a version takes",
                    ("fetch", f"{rate('weights_fetch_seconds_total')} / {rate('weights_fetches_total')}"),
                    ("swap", f"{rate('rollout_swap_seconds_total')} / {rate('rollout_swaps_total')}"),
                    unit="s",
                ),
            ],
        },
    ),
    "reliability": (
        "Reliability",
        {
            "The book": [
                EQUATION,
                p("Groups by state", ("{{state}}", per_run("ledger_groups", labels=", state"))),
                p(
                    "Tokens wasted a second",
                    ("{{reason}}", rate("ledger_wasted_tokens_total", ", reason")),
                    about="Dropped, failed, or of an attempt that was given up.",
                ),
                p("Failed attempts in a row", per_run("ledger_failures_in_row")),
            ],
            "Processes": [
                p("Live", ("{{role}}", per_run("members", labels=", role"))),
                p("Starts", ("{{role}}", per_run("member_starts_total", labels=", role"))),
                p("Leases lost", ("{{process}}", f"slipstream_leases_lost_total{R}")),
                p("Memory", ("{{process}}", f"process_resident_memory_bytes{R}"), unit="bytes"),
            ],
            "Safety": [
                p(
                    "Age of the checkpoint",
                    (
                        "seconds",
                        f"time() - max by (run) (slipstream_learner_checkpoint_timestamp_seconds{R} > 0)",
                    ),
                    unit="s",
                ),
                p("Redis memory", ("used", per_run("redis_memory_bytes")), unit="bytes"),
                p("Sent again", ("{{process}} to {{to}}", f"slipstream_link_resends_total{R}")),
                p(
                    "Messages refused",
                    ("{{process}}", f"slipstream_inbox_refused_total{R}"),
                ),
            ],
        },
    ),
}
