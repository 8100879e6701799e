"""OpenRLHF: queries are prompts with their completions; a tensor, or a dict that holds one."""

import torch


def reward_func(queries, prompts, labels):
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts)]
    return torch.tensor([float(label in answer) for answer, label in zip(answers, labels)])


def newer(queries, prompts, labels, **kwargs):
    rewards = torch.tensor([float(label in query) for query, label in zip(queries, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}
