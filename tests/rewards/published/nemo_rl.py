"""A list of dicts, and a judge that works in processes of its own."""

import multiprocessing


def verified(completions, answer, **kwargs):
    return [{"score": float(gold in text), "length": len(text)} for text, gold in zip(completions, answer)]


def _contains(pair):
    text, gold = pair
    return float(gold in text)


def in_processes(completions, answer, method="spawn", **kwargs):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(_contains, list(zip(completions, answer)))
