"""The whole config, one section per concern."""

from __future__ import annotations

from slipstream.config.base import Section, sub
from slipstream.config.sections import data_config as d
from slipstream.config.sections import services_config as s
from slipstream.config.sections.objective_config import ObjectiveSection
from slipstream.config.sections.telemetry_config import TelemetrySection


class Config(Section):
    """Everything a run needs to know, but for secrets, which come from the environment."""

    run: d.RunSection = sub(d.RunSection, "the run as a whole")
    model: d.ModelSection = sub(d.ModelSection, "the model to train")
    data: d.TrainDataSection = sub(d.TrainDataSection, "the prompts to train on")
    evaluation: d.EvaluationSection = sub(d.EvaluationSection, "evaluation on held-out prompts")
    sampling: d.SamplingSection = sub(d.SamplingSection, "how completions are sampled")
    batch: d.BatchSection = sub(d.BatchSection, "how much one step sees")
    staleness: s.StalenessSection = sub(s.StalenessSection, "how far generators may lag")
    objective: ObjectiveSection = sub(
        ObjectiveSection, "what is optimized; the defaults here are grpo's, another recipe brings its own"
    )
    rollout: s.RolloutSection = sub(s.RolloutSection, "generator replicas")
    reward: s.RewardSection = sub(s.RewardSection, "scoring")
    buffer: s.BufferSection = sub(s.BufferSection, "the store of scored groups")
    learner: s.LearnerSection = sub(s.LearnerSection, "training")
    weights: s.WeightsSection = sub(s.WeightsSection, "how weights travel")
    redis: s.RedisSection = sub(s.RedisSection, "the ledger's server")
    network: s.NetworkSection = sub(s.NetworkSection, "sockets")
    supervisor: s.SupervisorSection = sub(s.SupervisorSection, "process supervision")
    telemetry: TelemetrySection = sub(TelemetrySection, "logs")
