"""Where rows come from."""

import json
import sys
from pathlib import Path

import pytest

from slipstream.errors import UserError
from slipstream.prompts.sets import open_source
from slipstream.prompts.source_spec import DataSpec
from slipstream.prompts.sources.jsonl import JsonLines
from slipstream.prompts.sources.tables import reason_of

GSM8K = str(Path(__file__).parents[1] / "data" / "gsm8k_shape.jsonl")


def rows(**spec):
    source = open_source(DataSpec(**spec))
    return [source[i] for i in range(len(source))]


def test_arithmetic_of_two_digits_asks_what_reasoning_gym_asks():
    """The built-in task stands for reasoning-gym's chain_sum: the same 200 questions, answers and form."""
    gym = rows(
        kind="reasoning_gym",
        name="chain_sum",
        limit=4000,
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    )
    theirs = {(f"{row['metadata']['expression']} =", row["answer"]) for row in gym}
    assert all(row["question"].endswith(f": {row['metadata']['expression']} =") for row in gym)
    ours = [(row["prompt"], row["answer"]) for row in rows(kind="arithmetic")]
    assert len(ours) == 200
    assert set(ours) == theirs


def test_arithmetic_is_seeded_distinct_and_as_long_as_asked():
    options = {"terms": 3, "digits": 2, "ops": "+-*"}
    some = rows(kind="arithmetic", options=options, limit=300)
    assert len({row["prompt"] for row in some}) == 300
    assert some == rows(kind="arithmetic", options=options, limit=300)
    assert some != rows(kind="arithmetic", options=options, limit=300, seed=1)
    for row in some:
        left, mid, right = row["prompt"].removesuffix(" =").split()[::2]
        assert all(10 <= int(number) <= 99 for number in (left, mid, right))
        # The prompts hold digits and operators only, so Python itself is the reference.
        assert row["answer"] == str(eval(row["prompt"].removesuffix("=")))  # noqa: S307


def test_sort_digits_has_the_form_of_the_tiny_models_task():
    some = rows(kind="sort_digits", limit=500, seed=2)
    assert len({row["prompt"] for row in some}) == 500
    for row in some:
        assert len(row["prompt"]) == 7
        assert row["prompt"][6] == ">"
        assert row["answer"] == "".join(sorted(row["prompt"][:6])) + "$"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "arithmetic", "limit": 201}, "data.limit: 201.*at most 200"),
        ({"kind": "arithmetic", "options": {"terms": 0}}, "data.options.terms: 0"),
        ({"kind": "arithmetic", "options": {"ops": "/"}}, "data.options.ops"),
        ({"kind": "arithmetic", "options": {"digit": 1}}, "data.options.digit:.*terms, digits, ops"),
        ({"kind": "sort_digits"}, "data.limit.*1000000 questions"),
        ({"kind": "sort_digits", "limit": 0}, "data.limit: 0"),
        ({"kind": "reasoning_gym", "name": "chain_sum"}, "data.limit: None"),
        ({"kind": "reasoning_gym", "name": "chain_summ", "limit": 1}, "data.name.*chain_summ"),
        ({"kind": "reasoning_gym", "name": "chain_sum", "limit": 1, "options": {"x": 1}}, "data.name.*'x'"),
        ({"kind": "jsonl", "path": "/nowhere.jsonl"}, "data.path: cannot read '/nowhere.jsonl'"),
        ({"kind": "huggingface", "path": "/nowhere"}, "data.path: no dataset at '/nowhere'"),
    ],
)
def test_sources_that_cannot_be_had_are_one_line(spec, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message) as error:
        rows(**spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "package"), [("huggingface", "datasets"), ("reasoning_gym", "reasoning_gym")])
def test_missing_optional_package_says_what_to_install(kind, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install '[a-z-]+>="):
        open_source(DataSpec(kind=kind, path="x", name="chain_sum", limit=1))


def test_jsonl_reads_rows_by_line_and_skips_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"prompt": "é"}\r\n\n{"prompt": "b"}\n   \n{"prompt": "c"}'.encode())
    source = JsonLines(str(path))
    assert [source[i]["prompt"] for i in (2, 0, 1)] == ["c", "é", "b"]
    assert source.label(1) == f"{path}:3"
    assert len(JsonLines(str(path), limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "b"', "not a line of JSON"),
        (b"[1, 2]", "a JSON list, not an object"),
        (b'{"prompt": "\xff"}', "not a line of JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "not a line of JSON"),
    ],
)
def test_broken_line_is_named_by_file_and_number(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"rows\.jsonl:3: .*{reason}"):
        rows(kind="jsonl", path=str(path))


def test_empty_file_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="holds no rows"):
        rows(kind="jsonl", path=str(tmp_path / "rows.jsonl"))


def test_row_that_changes_under_the_run_is_refused_by_line_rather_than_misread(jsonl):
    path = jsonl([{"prompt": "aaaa"}, {"prompt": "b"}])
    source = JsonLines(path)
    assert source[1] == {"prompt": "b"}
    jsonl([{"prompt": "aaaa"}, {"prompt": "c"}, {"prompt": "d"}])
    assert source[0] == {"prompt": "aaaa"}
    with pytest.raises(UserError, match=r"rows\.jsonl:2 changed while it was in use"):
        source[1]


def test_file_that_is_touched_appended_to_replaced_or_removed_goes_on_being_read(jsonl):
    rows = [{"prompt": "aaaa"}, {"prompt": "b"}]
    path = Path(jsonl(rows))
    path.write_text(path.read_text().rstrip("\n"))
    source = JsonLines(str(path))
    path.touch()
    with path.open("a") as file:
        file.write('\n{"prompt": "c"}\n')
    assert [source[0], source[1]] == rows
    jsonl(rows)
    assert [source[0], source[1]] == rows
    Path(jsonl([{"prompt": "x"}], "new.jsonl")).rename(path)
    assert [source[0], source[1]] == rows
    path.unlink()
    assert [source[0], source[1], len(source)] == [*rows, 2]


def test_gsm8k_answer_is_the_number_without_commas():
    found = rows(kind="gsm8k", path=GSM8K)
    assert [row["answer"] for row in found] == ["18", "1240", "-4", "1.5"]
    assert found[0]["prompt"].startswith("Mira bakes")
    assert found[0]["solution"].endswith("#### 18")


def test_gsm8k_row_without_a_final_number_is_named(jsonl):
    path = jsonl([{"question": "q", "answer": "#### 1"}, {"question": "q", "answer": "no idea"}])
    with pytest.raises(UserError, match=r"rows\.jsonl:2: no number after '####'"):
        rows(kind="gsm8k", path=path)
    with pytest.raises(UserError, match="no text in 'question'"):
        rows(kind="gsm8k", path=jsonl([{"prompt": "q", "answer": "#### 1"}]))


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    module.disable_progress_bars()
    return module


def test_datasets_folder_parquet_and_json_give_the_same_rows(datasets, tmp_path):
    table = datasets.Dataset.from_list([{"question": f"q{i}", "answer": f"#### {i}"} for i in range(5)])
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([4])}).save_to_disk(str(tmp_path / "dict"))
    (tmp_path / "files").mkdir()
    table.to_parquet(str(tmp_path / "files" / "train.parquet"))
    places = ["saved", "dict", "files", "files/train.parquet"]
    loaded = [rows(kind="huggingface", path=str(tmp_path / place), limit=3) for place in places]
    assert loaded == [[dict(table[i]) for i in range(3)]] * 4
    assert rows(kind="gsm8k", path=str(tmp_path / "dict"), split="test")[0]["answer"] == "4"
    with pytest.raises(UserError, match=r"'nope'.*splits train, test"):
        rows(kind="huggingface", path=str(tmp_path / "dict"), split="nope")


def test_reasoning_gym_row_keeps_the_entry_that_its_scorer_needs():
    row = rows(kind="reasoning_gym", name="chain_sum", limit=2, seed=7)[0]
    assert row["prompt"] == row["question"]
    assert {"answer", "metadata"} <= set(row)
    json.dumps(row)


def test_a_set_of_several_configurations_names_them_and_the_setting(tmp_path):
    for name in ("main", "socratic"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name}) + "\n")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("main", "socratic"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    with pytest.raises(UserError, match=r"\['main', 'socratic'\].*; name one of .*: data\.name=NAME"):
        open_source(DataSpec(kind="huggingface", path=str(tmp_path)))
    chosen = open_source(DataSpec(kind="huggingface", path=str(tmp_path), name="socratic"))
    assert chosen[0] == {"question": "socratic"}


def test_what_stands_behind_an_error_of_datasets_is_told():
    error = OSError("An error occurred while generating the dataset")
    error.__cause__ = ValueError("row 7: no number")
    assert reason_of(error) == "An error occurred while generating the dataset: row 7: no number"
