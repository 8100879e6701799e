"""OpenRLHF: queries are prompts with their completions; a tensor, or a dict that holds one."""

import torch


def reward_func(queries, prompts, labels):
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts)]
    return torch.tensor([float(label in answer) for answer, label in zip(answers, labels)])


def newer(queries, prompts, labels, **kwargs):
    rewards = torch.tensor([float(label in query) for query, label in zip(queries, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}


def by_text(queries, prompts, labels):
    return {
        "rewards": [float(label in query) for query, label in zip(queries, labels)],
        "extra_logs": {"n": [1, 2]},
    }


async def remote(queries, prompts, labels):
    return {"rewards": torch.tensor([float(label in query) for query, label in zip(queries, labels)])}
