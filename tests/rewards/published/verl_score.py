"""verl, DAPO: one sample, and a dict with more than the score."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = ground_truth in solution_str
    return {"score": 1.0 if found else -1.0, "acc": found, "pred": solution_str[-20:]}


def plain(solution_str, ground_truth, **kwargs):
    return float(ground_truth in solution_str and kwargs["data_source"] == "toy/sums")
