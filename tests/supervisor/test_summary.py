from __future__ import annotations

import io
from typing import Any

from slipstream.ledger.counts import Counts
from slipstream.run.folder import RunFolder, append_line, line_of_descent
from slipstream.supervisor.summary import curve, print_summary


def step(number: int, reward: float = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "version": number,
        "reward": reward,
        "seconds": 2.0,
        "tokens": 100,
        "age_mean": 1.0,
        "age_max": 2,
        "metrics": {"slipstream_objective_masked_age_ratio": 0.1},
        "parts": {"wait": 1.5, "forward": 0.5},
    } | more


def test_steps_that_were_made_again_replace_the_lost_ones():
    steps = [step(1), step(2), step(3), step(2, 0.9), step(3, 0.8)]
    assert [(s["step"], s["reward"]) for s in line_of_descent(steps)] == [(1, 0.5), (2, 0.9), (3, 0.8)]


def test_the_curve_shows_each_step_and_its_scale():
    lines = curve([0.0, 0.5, 1.0])
    assert lines[0] == "reward per step"
    assert lines[1].startswith(" 1.00 │")
    assert [row[-3:] for row in lines[1:9]] == ["  █"] * 4 + [" ██"] * 4
    assert lines[-1].endswith("step 3")


def test_a_long_run_shares_columns_and_rewards_above_one_fit():
    lines = curve([2.0] * 1000)
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].startswith(" 2.00")
    assert "█" in lines[1]


def test_negative_rewards_draw_nothing_and_fail_nothing():
    assert "█" not in "".join(curve([-1.0, -0.5]))


def test_the_summary_says_what_a_person_asks(tmp_path):
    folder = RunFolder(tmp_path, "r")
    folder.create()
    for number in (1, 2):
        append_line(folder.steps, step(number))
    for at, reward in ((0, 0.25), (2, 0.75)):
        append_line(
            folder.evaluations, {"set": "holdout", "step": at, "reward": reward, "scored": 64, "binary": True}
        )
        append_line(
            folder.evaluations, {"set": "graded", "step": at, "reward": reward, "scored": 9, "binary": at == 0}
        )
    append_line(folder.evaluations, {"set": "holdout", "step": 3, "reward": None, "scored": 0})
    out = io.StringIO()
    print_summary(folder, out)
    text = out.getvalue()
    assert "run r: 2 steps, 2 versions" in text
    assert "accuracy 0.250 (step 0) -> 0.750 (step 2), 64 held-out prompts" in text
    assert "graded       mean reward 0.250 (step 0) -> 0.750 (step 2)" in text  # not every reward was 0 or 1
    assert "0.50 steps/s, 50 tokens/s" in text
    assert "age 1.00 mean, 2 max" in text
    assert "10.0% tokens masked" in text
    assert "wait 75%, forward 25%" in text
    assert str(folder.path) in text


def test_several_rewards_are_shown_each(tmp_path):
    folder = RunFolder(tmp_path, "r")
    folder.create()
    for number in range(30):
        parts = {"right": number / 30, "form": 1.0} if number else {"form": 0.0}  # one may apply to nothing
        append_line(folder.steps, step(number + 1, components=parts))
    out = io.StringIO()
    print_summary(folder, out)
    assert "rewards      form 0.900 -> 1.000, right 0.167 -> 0.817 (first and last 10 steps)" in out.getvalue()


def test_a_run_without_steps_says_so(tmp_path):
    out = io.StringIO()
    print_summary(RunFolder(tmp_path, "r"), out)
    assert "no step was made" in out.getvalue()


def test_what_was_left_out_is_listed_by_reason_also_without_a_step(tmp_path):
    folder = RunFolder(tmp_path, "r")
    counters = {"groups:dropped:stale": "3", "groups:failed:engine_error": "2", "unscored/timeout": "7"}
    counts = Counts.read(9, counters)
    for made in (0, 1):
        if made:
            folder.create()
            append_line(folder.steps, step(1))
        out = io.StringIO()
        print_summary(folder, out, counts)
        text = out.getvalue()
        assert "dropped      3 groups (stale 3)" in text
        assert "failed       2 groups (engine_error 2)" in text
        assert "unscored     7 samples (timeout 7)" in text


def test_without_a_ledger_the_newest_step_says_what_was_left_out(tmp_path):
    folder = RunFolder(tmp_path, "r")
    folder.create()
    more = {"dropped_total": {"all_wrong": 4}, "failed_total": {}, "unscored_total": {"exception": 1}}
    append_line(folder.steps, step(1, **more))
    out = io.StringIO()
    print_summary(folder, out)
    assert "dropped      4 groups (all_wrong 4)" in out.getvalue()
    assert "unscored     1 samples (exception 1)" in out.getvalue()
    assert "failed" not in out.getvalue()


def test_warnings_stand_in_the_summary_with_their_steps(tmp_path):
    folder = RunFolder(tmp_path, "r")
    folder.create()
    append_line(folder.steps, step(1))
    for at, kind, over in (
        (5, "a", False),
        (9, "a", True),
        (12, "a", False),
        (12, "b", False),
        (15, "a", True),
    ):
        append_line(folder.warnings, {"step": at, "kind": kind, "text": f"mend {kind}", "over": over})
    out = io.StringIO()
    print_summary(folder, out)
    assert "warning      steps 12 to 15, 2 times in all: mend a" in out.getvalue()
    assert "warning      since step 12: mend b" in out.getvalue()
