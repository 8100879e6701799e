"""TRL, message prompts: a completion is a list of messages."""


def has_answer(prompts, completions, answer, **kwargs):
    assert prompts[0][-1]["role"] == "user"
    replies = [completion[0]["content"] for completion in completions]
    return [1.0 if gold in reply else 0.0 for reply, gold in zip(replies, answer)]


def texts(completions, answer, **kwargs):
    return [1.0 if text.strip().endswith(gold) else 0.0 for text, gold in zip(completions, answer)]


def extras(completions, completion_ids, trainer_state, log_metric, **kwargs):
    log_metric("ids", sum(map(len, completion_ids)))
    return [float(trainer_state.global_step + len(ids)) for ids in completion_ids]


def kwargs_only(completions, **kwargs):
    return [float(gold in str(text)) for text, gold in zip(completions, kwargs["solution"])]


def asks_for_what_is_not_there(completions, **kwargs):
    return [float(gold == text) for text, gold in zip(completions, kwargs["gold"])]
