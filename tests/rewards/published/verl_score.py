"""verl, DAPO: one sample, and a dict with more than the score; its batch form; DAPO's options."""

import asyncio
import functools


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = ground_truth in solution_str
    return {"score": 1.0 if found else -1.0, "acc": found, "pred": solution_str[-20:]}


def plain(solution_str, ground_truth, **kwargs):
    return float(ground_truth in solution_str and kwargs["data_source"] == "toy/sums")


def batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert data_sources[0] == "toy/sums"
    assert extra_infos[0] == {"index": 0}
    return [
        {"score": float(gold in text), "acc": gold in text} for text, gold in zip(solution_strs, ground_truths)
    ]


async def judged(data_source, solution_str, ground_truth, extra_info, reward_router_address=None):
    await asyncio.sleep(0)
    return float(ground_truth in solution_str)


def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return score if ground_truth in solution_str else format_score


twice = functools.partial(gsm8k, score=2.0)
