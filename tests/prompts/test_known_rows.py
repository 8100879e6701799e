"""A source may grow under a run; a row of the run that has changed is named."""

from __future__ import annotations

import json
import os

import pytest

from slipstream.config.load import build
from slipstream.errors import UserError
from slipstream.models.resolve import resolve
from slipstream.prompts.known_rows import KNOWN, prompts_of_run
from slipstream.run.folder import RunFolder
from slipstream.run.tokens import load_tokenizer


@pytest.fixture(scope="module")
def model():
    return resolve("tiny-sorter")


@pytest.fixture(scope="module")
def words(model):
    return load_tokenizer(str(model))


class Run:
    """One run over one file."""

    def __init__(self, folder, words, model):
        self.file = folder / "rows.jsonl"
        self._words, self._model = words, model
        tree = {
            "run": {"name": "r", "root": str(folder / "runs")},
            "model": {"source": "tiny-sorter", "context_length": 16},
            "sampling": {"max_new_tokens": 7},
            "data": {"kind": "jsonl", "path": str(self.file), "template": "plain", "holdout": 0},
            "reward": {"functions": [{"use": "exact_match"}]},
        }
        self.config = build(tree)[0]

    def write(self, *prompts):
        self.file.write_text("".join(json.dumps({"prompt": each, "answer": "1"}) + "\n" for each in prompts))

    def prompts(self):
        return prompts_of_run(self.config, self._words, self._model)[0]

    def checkpoint(self):
        (RunFolder.of(self.config).checkpoints / "step-00000001").mkdir(parents=True)


@pytest.fixture
def run(tmp_path, words, model):
    return Run(tmp_path, words, model)


def test_rows_that_came_since_the_run_began_are_no_part_of_it(run, caplog):
    run.write("123>", "456>")
    before = run.prompts()
    run.checkpoint()
    run.write("123>", "456>", "789>")
    again = run.prompts()
    assert again.fingerprint == before.fingerprint
    assert [each.text for each in again] == ["123>", "456>"]
    assert "1 rows were added since the run began with 2: they are left out of it" in caplog.text


def test_a_file_that_is_touched_or_written_anew_with_the_same_rows_is_the_same(run, caplog):
    run.write("123>", "456>")
    before = run.prompts()
    run.checkpoint()
    rows = [json.loads(line) for line in run.file.read_text().splitlines()]
    run.file.unlink()
    run.file.write_text("\n".join(json.dumps(dict(reversed(row.items())), indent=None) for row in rows))
    os.utime(run.file, (1, 1))
    assert run.prompts().fingerprint == before.fingerprint
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (("123>", "756>", "789>"), r"rows\.jsonl:2 is not the row that it was"),
        (("999>", "756>"), r"rows\.jsonl:1 is not the row that it was"),
        (("123>",), r"row 2 is not the row that it was"),
        (("000>", "123>", "456>"), r"rows\.jsonl:1 is not the row that it was"),
    ],
)
def test_the_first_row_that_differs_is_named(run, now, told):
    run.write("123>", "456>")
    run.prompts()
    run.checkpoint()
    run.write(*now)
    with pytest.raises(UserError, match=told) as caught:
        run.prompts()
    assert "run.name=NEW learner.start_from=" in str(caught.value)


def test_a_run_without_a_checkpoint_takes_the_rows_as_they_are(run):
    run.write("123>")
    run.prompts()
    run.write("456>")
    assert [each.text for each in run.prompts()] == ["456>"]


def test_a_damaged_file_of_known_rows_ends_nothing(run):
    run.write("123>")
    run.prompts()
    (RunFolder.of(run.config).path / KNOWN).write_bytes(b"\x00\xff")
    assert len(run.prompts()) == 1


def test_a_hold_out_stays_what_it_was_when_rows_came(run):
    run.config = run.config.model_copy(update={"data": run.config.data.model_copy(update={"holdout": 3})})
    run.write(*(f"{n}>" for n in range(100, 110)))
    before = run.prompts()
    run.checkpoint()
    run.write(*(f"{n}>" for n in range(100, 140)))
    assert [each.text for each in run.prompts()] == [each.text for each in before]
