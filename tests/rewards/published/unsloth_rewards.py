"""unsloth's notebooks: questions out of prompts, counters in the module, factories, objects that are called."""

import re

PRINTED = 0


def check_numbers(prompts, completions, answer, **kwargs):
    global PRINTED
    question = prompts[0][-1]["content"]
    responses = [completion[0]["content"] for completion in completions]
    if PRINTED % 5 == 0:
        print("*" * 20 + f"Question:\n{question}", f"\nResponse:\n{responses[0]}")
    PRINTED += 1
    found = [found.group(1) if (found := re.search(r"([0-9]+)", text)) else None for text in responses]
    return [
        0 if guess is None else 1.5 if float(guess) == float(gold) else -0.5
        for guess, gold in zip(found, answer)
    ]


def make_length_reward(most):
    def length_reward(completions, **kwargs):
        return [float(len(completion[0]["content"]) <= most) for completion in completions]

    return length_reward


short = make_length_reward(100)


class Judge:
    def __call__(self, completions, answer, log_metric=None, **kwargs):
        right = [gold in completion[0]["content"] for completion, gold in zip(completions, answer)]
        if log_metric is not None:
            log_metric("accuracy", sum(right) / len(right))
            log_metric("nothing", float("nan"))
        return right


judge = Judge()
