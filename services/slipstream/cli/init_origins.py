"""Numbers of other projects, which `init` takes on request."""

from __future__ import annotations

MODEL = "smollm2-135m-instruct"
# What each project does where nothing is said; what differs besides stands in docs/guides/coming-from.md.
FROM = {
    "trl": {"batch.group_size": 8, "sampling.max_new_tokens": 256, "learner.optimizer.learning_rate": 1e-6},
    "verl": {"batch.group_size": 8, "sampling.max_new_tokens": 512, "learner.optimizer.learning_rate": 1e-6},
    "openrlhf": {
        "batch.group_size": 8,
        "sampling.max_new_tokens": 1024,
        "learner.optimizer.learning_rate": 1e-6,
    },
}
