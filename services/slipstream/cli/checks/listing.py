"""The one list of checks behind a config: `validate`, `up` and `resume` all go through it.

A check takes the config and yields what is wrong, one line each, with the setting, its value and the mend; a
`UserError` that it raises counts as one line. To add one, write the function beside its like and name it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slipstream.cli.checks import data_check as data
from slipstream.cli.checks import deep, engine, places, rewards
from slipstream.cli.checks import model_check as model
from slipstream.config.schema import Config
from slipstream.errors import UserError

Check = Callable[[Config], Iterable[str]]

# No torch, no network: every `validate` has time for these.
PLAIN: tuple[Check, ...] = (
    rewards.functions,
    rewards.order,
    rewards.sinks,
    data.files,
    data.rows,
    model.folder,
    model.architecture,
    model.context,
    model.chat_template,
    model.adapters,
    model.frozen,
    model.reference,
    model.start,
    engine.options,
    engine.names,
    places.root,
    places.keys,
    places.upload_scheme,
)
# No torch either, but they reach out: `up` and `validate --deep` ask.
REACHING: tuple[Check, ...] = (places.upload_rights,)
# `up` asks; `validate --deep` calls the rewards with more rows, and shows what they say.
STARTING: tuple[Check, ...] = (*REACHING, rewards.trial)
# They load torch, or fetch; `validate --deep` asks, and the roles themselves when they start.
NOT_PLAIN = (
    "the device and its dtypes, the tensors of the model and the reference, rights at learner.checkpoint.upload, "
    "all rows with the tokenizer, and three prompts with their rewards"
)
DEEP: tuple[Check, ...] = (deep.device, deep.weights, deep.reference)


def problems(config: Config, checks: Sequence[Check] = PLAIN) -> list[str]:
    """Everything that is wrong, in the order of the list; what two checks say alike is said once."""
    found: dict[str, None] = {}
    for check in checks:
        try:
            found |= dict.fromkeys(check(config))
        except UserError as error:
            found[str(error)] = None
    return list(found)
