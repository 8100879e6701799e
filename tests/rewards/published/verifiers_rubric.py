"""verifiers, prime-rl: one sample, its arguments by their names, completions as messages."""


async def correct(prompt, completion, answer, **kwargs):
    assert prompt[-1]["role"] == "user"
    assert kwargs["label"] == answer
    return float(answer in completion[-1]["content"])


def text_of(completion, **kwargs):
    return float(kwargs["answer"] in completion)


def asked(prompt, completion):
    return float("3 + 5" in prompt and "8" in completion)
