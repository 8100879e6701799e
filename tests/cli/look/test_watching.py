"""status, top and report: drawn from made-up runs; what is asked goes to the ledger."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import termios
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from slipstream.cli.look import report as report_module
from slipstream.cli.look import top as top_module
from slipstream.cli.look.picture import View, picture, sparkline
from slipstream.cli.look.report import page
from slipstream.cli.look.report_data import reported
from slipstream.cli.look.run_state import Look, StepsFile, without_ledger
from slipstream.cli.look.series import per_step, thinned
from slipstream.cli.look.status import _for_a_person
from slipstream.cli.look.top import Watcher, rates_between
from slipstream.errors import LedgerError
from slipstream.ledger.counts import Audit, Counts
from slipstream.ledger.records import RunState, RunTerms
from slipstream.run.attempt_end import End, end_of, record_end
from slipstream.run.folder import RunFolder, append_line

COUNTERS = {
    "groups:trained": "8",
    "tokens:trained": "80",
    "groups:dropped:stale": "2",
    "groups:rolling": "3",
    "tokens_in": "80",
    "unscored/timeout": "6",
}


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number,
        "version": number,
        "stepped": True,
        "reward": number / 10,
        "length": 12.0,
        "age_mean": 1.0,
        "age_max": 2,
        "gradient_norm": 1.0,
        "tokens": 100,
        "seconds": 2.0,
        "unscored": 0,
        "parts": {"wait": 0.5, "forward": 1.5},
        "metrics": {"slipstream_objective_clip_high_ratio": 0.1, "slipstream_objective_clip_low_ratio": 0.2},
        "ages": {"0": 60, "1": 40},
        "lengths": [1, 2, 0, 1],
        "longest": 99,
        "components": {"exact": 0.5},
        "load": {"generate": 0.9, "reward": 0.1, "data": 0.0, "train": 0.4, "sync": 0.0},
        "stages": {"generate": 1.8, "reward": 0.2, "data": 0.0, "train": 0.8, "sync": 0.0},
        "limit_ratio": 0.9,
        "bottleneck": "generate",
        **changes,
    }


@pytest.fixture
def state() -> RunState:
    return RunState(
        terms=RunTerms(run_id="r", dataset_fingerprint="f", prompts=9, seed=0, max_staleness=2),
        version=4,
        step=4,
        durable_step=3,
        next=13,
        status="running",
        finish_reason="",
        learner="l",
        failures_in_row=2,
        last_failure="engine",
        lost_versions=[(2, 2)],
        changed=[],
    )


@pytest.fixture
def look(state, tmp_path, member) -> Look:
    members = [
        member("rollout-0", "rollout", 4, tokens=100, groups=5, load=6, slots=8),
        member("rollout-1", "rollout", 1, tokens=50, groups=2, load=2, slots=8),
        member("learner", "learner", 4),
    ]
    evaluations = [{"set": "holdout", "step": 0, "version": 0, "reward": 0.25, "scored": 8}]
    counts = Counts.read(13, COUNTERS)
    return Look("r", tmp_path, 8, [step(n) for n in range(1, 5)], evaluations, state, counts, members)


def drawn(look: Look, width: int = 110, **view: Any) -> str:
    console = Console(record=True, width=width, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    console.print(picture(View(look, **view), width))
    console.file.close()
    return console.export_text()


def test_the_picture_shows_stations_lags_and_faults(look):
    text = drawn(look, rates={"rollout-0": {"tokens": 1234.0}})
    for part in (
        "rollout ×2",
        "reward ×0",
        "3 in flight",
        "1,234 tok/s",
        "step 4 of 8",
        "stale 2",
        "2 in a row: engine",
    ):
        assert part in text, part
    assert "limited by generate, 90% of the speed limit" in text
    assert "reward, buffer" in text  # nobody is there
    assert max(map(len, text.splitlines())) <= 110


def test_samples_without_a_reward_are_those_of_all_groups(look):
    """A group that is dropped for them is in no step's batch."""
    assert "timeout 6" in drawn(look)
    assert "6 samples are unscored (timeout 6)" in _for_a_person(look)
    assert look.as_json()["unscored"] == {"timeout": 6}


def test_what_the_learner_warns_of_is_shown_until_it_is_over(look, folder):
    cut = {"kind": "cut_off", "step": 5, "text": "raise max_new_tokens", "over": False}
    warned = replace(look, warnings=[cut])
    assert "raise max_new_tokens" in drawn(warned)
    assert "warning: raise max_new_tokens" in _for_a_person(warned)
    assert warned.as_json()["warnings"] == ["raise max_new_tokens"]
    assert replace(look, warnings=[cut, cut | {"over": True}]).concerns == []
    append_line(folder.warnings, cut)
    assert "Warning: raise max_new_tokens." in reported(folder, None, None, "")["lead"]


def test_a_run_that_was_ended_from_outside_is_not_said_to_run(look, folder, state):
    """Its ledger was told nothing, so its last word is that the run runs."""
    left = replace(look, members=[], held=False)
    assert left.as_json()["status"] == "stopped"
    assert left.missing == []
    told = f"ended from outside; to go on: slipstream resume {look.folder}"
    assert told in _for_a_person(left)
    assert "running" not in _for_a_person(left)
    assert "left" not in _for_a_person(left)  # no time is left to a run that does not go on
    assert told.split(";")[0] in drawn(left)
    assert "● stopped" in drawn(left)
    assert reported(folder, state, None, "", there=False)["sub"].startswith("stopped")


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (End(3, "learner: run halted: no signal"), "ended: learner: run halted: no signal"),
        (End(1), "ended with exit code 1"),
        (End(0), "was asked to stop"),
    ],
)
def test_a_run_that_stopped_says_how_as_far_as_that_is_known(look, folder, end, says):
    (folder.path / "attempts" / "000").mkdir()
    assert end_of(folder) is None
    record_end(folder, end)
    assert says in _for_a_person(replace(look, members=[], held=False, end=end_of(folder)))


def test_a_run_that_finished_while_somebody_watched_has_finished(look, folder):
    """Its ledger goes within the second, so that a watcher misses its last word."""
    (folder.path / "attempts" / "000").mkdir()
    record_end(folder, End(0, finished=True))
    assert without_ledger(look, folder).status == "finished"


@pytest.mark.parametrize("changes", [{"members": []}, {"held": False}])
def test_a_run_that_anybody_has_in_hand_runs(look, changes):
    """Roles on other hosts hold no folder here, and an `up` that begins has no members yet."""
    assert replace(look, **changes).status == "running"
    ended = replace(look, members=[], held=False, state=msgspec.structs.replace(look.state, status="finished"))
    assert ended.status == "finished"


async def test_top_says_when_the_supervisor_it_watches_has_gone(look, folder, monkeypatch):
    monkeypatch.setattr(top_module, "EVERY_SECONDS", 0.0)
    asked, again = asyncio.Event(), asyncio.Event()
    watcher = Watcher(FakeLedger(), look, lambda last: without_ledger(last, folder))  # type: ignore[arg-type]

    async def fails() -> Look:
        if asked.is_set():
            again.set()
            await asyncio.Event().wait()
        asked.set()
        raise LedgerError("no answer")

    async with asyncio.timeout(30):
        following = asyncio.create_task(watcher.follow(fails))
        await again.wait()
    following.cancel()
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(picture(watcher.view(), 110))
    text = console.export_text()
    assert "● stopped" in text
    assert "ended from outside" in text


def test_an_empty_run_and_a_narrow_terminal_can_be_drawn(look):
    empty = Look("r", look.folder, None, [], [], look.state, Counts.read(0, {}), [])
    assert "rollout ×0" in drawn(empty, width=70)


def test_sparklines_keep_the_newest_on_the_right_and_their_width():
    assert sparkline([0, 1], 10) == "▁█"
    assert len(sparkline(list(range(1000)), 20)) <= 20
    assert sparkline([3, 3], 10) == "▁▁"
    assert sparkline([], 10) == ""


def test_status_as_json_says_what_limits_and_what_is_missing(look):
    answer = json.loads(json.dumps(look.as_json()))
    assert answer["bottleneck"] == "generate"
    assert answer["missing_roles"] == ["reward", "buffer"]
    assert answer["groups"]["trained"] == 8
    assert answer["groups"]["open"] == 3
    assert answer["equation"]["holds"]
    assert answer["tokens_per_second"] == 50.0
    assert answer["seconds_left"] == 8.0
    assert [(each["id"], each["lag"]) for each in answer["processes"]][:2] == [
        ("rollout-0", 0),
        ("rollout-1", 3),
    ]


def test_rates_are_differences_of_one_life(look, member):
    first = replace(look, members=[member("rollout-0", "rollout", 4, up=1.0, tokens=100, groups=5)])
    later = replace(
        look,
        members=[
            member("rollout-0", "rollout", 4, up=3.0, tokens=300, groups=9),
            member("new", "rollout", up=3.0, tokens=9),
        ],
    )
    assert rates_between(first, later) == {"rollout-0": {"tokens": 100.0, "groups": 2.0}}
    assert rates_between(later, later) == {}


async def test_a_rate_stands_until_its_process_tells_something_new(look, member):
    """Processes tell of themselves less often than one looks."""
    watcher = Watcher(FakeLedger(), look)  # type: ignore[arg-type]
    for up, tokens in ((1.0, 0.0), (3.0, 200.0), (3.0, 200.0)):
        watcher.show(replace(look, members=[member("rollout-0", "rollout", 4, up=up, tokens=tokens)]))
    assert watcher.view().rates["rollout-0"]["tokens"] == 100.0
    watcher.show(replace(look, members=[]))
    assert watcher.view().rates == {}


def test_a_growing_file_is_read_once_and_lost_steps_are_replaced(tmp_path):
    file = StepsFile(tmp_path / "steps.jsonl")
    assert file.read() == []
    append_line(file.path, step(1))
    append_line(file.path, step(2))
    with file.path.open("a") as torn:
        torn.write('{"step": 3')
    assert [each["step"] for each in file.read()] == [1, 2]
    append_line(file.path, step(2, reward=0.9))
    assert [(each["step"], each["reward"]) for each in file.read()] == [(1, 0.1), (2, 0.9)]


class FakeLedger:
    def __init__(self, status: str = "running") -> None:
        self.status, self.wishes = status, []

    async def state(self):
        return type("State", (), {"status": self.status})

    async def ask(self, what):
        self.wishes.append(what)

    async def pause(self):
        self.status = "paused"

    async def resume(self):
        self.status = "running"


async def test_keys_ask_through_the_ledger_and_a_drain_is_asked_for_twice(look):
    ledger = FakeLedger()
    watcher = Watcher(ledger, look)  # type: ignore[arg-type]
    await watcher.press("p")
    assert ledger.status == "paused"
    await watcher.press("p")
    assert ledger.status == "running"
    await watcher.press("c")
    await watcher.press("d")
    assert "press d again" in watcher.view().ask
    await watcher.press("x")
    await watcher.press("d")
    assert ledger.wishes == ["checkpoint"]
    await watcher.press("d")
    assert ledger.wishes == ["checkpoint", "drain"]
    await watcher.press("q")
    assert watcher.over


async def test_a_terminal_that_has_gone_ends_the_view(look):
    watcher = Watcher(FakeLedger(), look)  # type: ignore[arg-type]
    await watcher.press("")
    assert watcher.over


async def test_keys_come_from_a_terminal_that_is_given_back_as_it_was(monkeypatch):
    person, terminal = os.openpty()
    with os.fdopen(terminal) as stdin, os.fdopen(person, "wb", buffering=0) as fingers:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(terminal)
        with top_module._keys() as keys:
            assert not termios.tcgetattr(terminal)[3] & (termios.ICANON | termios.ECHO)
            fingers.write(b"pq")
            async with asyncio.timeout(60):
                assert [await keys.get(), await keys.get()] == ["p", "q"]
        assert termios.tcgetattr(terminal) == before


async def test_a_ledger_that_is_away_is_told_and_leaves_the_keys_alone(look, monkeypatch):
    monkeypatch.setattr(top_module, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(top_module, "ANSWER_SECONDS", 0.001)
    ledger, asked = FakeLedger(), asyncio.Event()
    ledger.ask = lambda what: asyncio.Event().wait()
    watcher = Watcher(ledger, look)  # type: ignore[arg-type]

    async def fails() -> Look:
        if asked.is_set():
            await asyncio.Event().wait()
        asked.set()
        raise LedgerError("gone")

    async with asyncio.timeout(30):
        following = asyncio.create_task(watcher.follow(fails))
        await asked.wait()
        await watcher.press("c")
        assert watcher.note == "not done: the ledger does not answer"
        await watcher.press("q")
    following.cancel()
    assert watcher.over
    text = drawn(look, away=watcher.view().away)
    assert "running when last heard of" in text
    assert "gone" in text


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path, "r")
    folder.create()
    folder.config.write_text("run: {name: r}\n")
    return folder


def test_the_page_holds_its_data_and_no_script_of_the_data_s(folder, state, look):
    for number in range(1, 5):
        append_line(folder.steps, step(number))
    evil = "</script><script>alert(1)</script>"
    append_line(folder.samples, {"step": 1, "version": 1, "ticket": 0, "prompt": evil, "samples": []})
    text = page(reported(folder, state, Audit(counts=look.counts, problems=[]), ""))
    assert text.count("<script") == 2
    assert "alert(1)</script>" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["samples"][0]["prompt"] == evil


def test_a_run_without_a_step_and_without_a_ledger_still_has_a_page(folder):
    data = reported(folder, None, None, "The ledger cannot be read: away")
    assert data["equation"] == {"missing": "The ledger cannot be read: away"}
    assert data["series"]["step"] == []
    assert "No step was made yet" in page(data)


def test_sums_of_the_report_by_hand(folder, state, look):
    for number in range(1, 5):
        append_line(folder.steps, step(number))
    data = reported(folder, state, Audit(counts=look.counts, problems=[]), "")
    assert data["ages"] == {"values": [0, 1], "labels": ["0", "1"], "counts": [240, 160]}
    assert data["parts"] == [{"name": "forward", "value": 6.0}, {"name": "wait", "value": 2.0}]
    assert data["series"]["clip"] == pytest.approx([0.3] * 4)
    assert data["components"] == {"exact": [0.5] * 4}
    assert next(term for term in data["equation"]["terms"] if term["name"] == "dropped")["reasons"] == "stale 2"
    assert [each["name"] for each in data["stages"] if each["limits"]] == ["generate"]


def test_a_long_run_is_thinned_and_keeps_its_ends():
    steps = [step(number) for number in range(1, 5001)]
    series = per_step(steps)
    assert len(series["step"]) == 600
    assert (series["step"][0], series["step"][-1]) == (1, 5000)
    assert {len(column) for column in series.values()} == {600}
    assert thinned([1, 2], 5) == [1, 2]


def test_the_page_s_parts_are_packaged():
    assert "</html>" in report_module._part("report.html")
