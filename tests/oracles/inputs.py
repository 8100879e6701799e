"""Random inputs that all sides see: padding, gaps in the mask, an empty and a one-token sequence, extreme ratios.

Four batches of the same shape [B, T], each with log-probabilities of the learner (`pi`), of the policy at the
start of the step (`old`), of the sampler (`mu`) and of the reference (`ref`), all at most 0:

- `plain`: log-ratios of the size that training sees.
- `extreme`: a third of the tokens has log-ratios of up to +-19.9.
- `beyond`: a third has log-ratios of up to +-30, which this project clamps to +-20.
- `bounded`: the same as `beyond` with `old`, `mu` and `ref` moved so that no log-ratio exceeds +-20, and the
  same `pi`. What a package without a clamp gives here is what this project gives for `beyond`.

Positions outside the mask hold log-probabilities too, so that a mask forgotten anywhere changes the result.
"""

from __future__ import annotations

import numpy as np

SAMPLES, TOKENS, CLASSES, LIMIT = 12, 10, 7, 20.0
HORIZON = 16
OVERLONG = (20, 8)  # longest completion and width of the buffer before it
LENGTHS = [10, 7, 1, 4, 9, 6, 10, 8, 1, 5, 3, 2]
EMPTY = 5  # a sequence without any token in the mask
RISING = 8  # one token and a negative advantage; where ratios are extreme, its own is the largest of all


def make() -> dict[str, np.ndarray]:
    """Every array by name; `batch/field` for those of a batch."""
    random = np.random.default_rng(20_260)
    arrays = {
        "lengths": np.array(LENGTHS),
        "mask": _mask(),
        "advantages": np.round(random.normal(size=SAMPLES), 3),
        "entropies": random.uniform(0, 2, (SAMPLES, TOKENS)),
        "logits": random.normal(size=(SAMPLES, TOKENS, CLASSES)),
        **_rewards(random),
    }
    arrays["advantages"][[4, RISING]] = 0.0, -1.5
    plain = [random.normal(0, size, (SAMPLES, TOKENS)) for size in (0.4, 0.3, 0.5)]
    arrays |= _batch("plain", plain, random)
    for name, sizes in (("extreme", (5.0, 12.0, 19.9)), ("beyond", (12.0, 21.0, 30.0))):
        logs = [_with_outliers(part, sizes, random) for part in plain]
        logs[0][RISING, 0] = sizes[-1]
        arrays |= _batch(name, logs, random)
    return arrays | _bounded(arrays)


def _mask() -> np.ndarray:
    mask = np.arange(TOKENS) < np.array(LENGTHS)[:, None]
    mask[0, 3:5] = mask[7, 0] = False  # tokens that the policy did not sample
    mask[EMPTY] = False
    return mask


def _with_outliers(part: np.ndarray, sizes: tuple[float, ...], random: np.random.Generator) -> np.ndarray:
    outliers = random.choice(sizes, part.shape) * random.choice([-1.0, 1.0], part.shape)
    return np.where(random.uniform(size=part.shape) < 0.33, outliers, part)


def _batch(name: str, logs: list[np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
    """Log-probabilities with given log(pi / old), log(old / mu) and log(ref / pi), the largest a little below 0."""
    log_r, log_rho, log_z = logs
    fields = {"pi": np.zeros_like(log_r), "old": -log_r, "mu": -log_r - log_rho, "ref": log_z}
    shift = np.max(list(fields.values()), axis=0) + random.uniform(0.02, 2.0, log_r.shape)
    return {f"{name}/{field}": values - shift for field, values in fields.items()}


def _bounded(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    pi, old, mu, ref = (arrays[f"beyond/{field}"] for field in ("pi", "old", "mu", "ref"))
    near = pi - np.clip(pi - old, -LIMIT, LIMIT)
    return {
        "bounded/pi": pi,
        "bounded/old": near,
        "bounded/mu": near - np.clip(old - mu, -LIMIT, LIMIT),
        "bounded/ref": pi + np.clip(ref - pi, -LIMIT, LIMIT),
    }


def _rewards(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Three groups of four: `scored` without gaps, `rewards` with unscored samples, both with one tied group."""
    scored = np.array([1, 0, 0.25, 1, 0.5, 0, 0, 1, 0.1, 0.1, 0.1, 0.1])
    rewards = scored.copy()
    rewards[[1, 4, 5, 6]] = np.nan  # one unscored in the first group, a single scored sample in the second
    components = np.round(random.uniform(size=(SAMPLES, 2)), 2)
    components[8:] = 0.7
    components[1] = np.nan  # unscored
    components[6, 1] = np.nan  # one component of a scored sample is missing
    return {
        "scored": scored,
        "rewards": rewards,
        "components": components,
        "full_components": np.array([[i % 4 / 4, (i * i) % 8 / 8] for i in range(SAMPLES)]),
        "component_weights": np.array([1.0, 0.5]),
        "groups": np.repeat([0, 1, 2], 4),
        "uneven_groups": np.array([0, 1, 0, 1, 0, 0, 2, 2, 2, 2, 1, 0]),
    }
