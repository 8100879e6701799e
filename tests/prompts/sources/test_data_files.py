"""Files of the shapes that people bring: each reader gives the rows that were written, and the split asked for."""

import gzip
import json
import subprocess
import sys

import pytest

from slipstream.errors import UserError
from slipstream.prompts.sets import open_source
from slipstream.prompts.source_spec import DataSpec
from slipstream.prompts.sources.data_files import named_files
from slipstream.prompts.sources.jsonl import JsonLines
from slipstream.prompts.sources.splits import rows_of

TEN = [{"prompt": f"q{n}"} for n in range(10)]
CELLS = [["question", "answer"], ["Which?", "007"], ["Price?", "1.50"], ["Gap?", ""], ["None?", "NA"]]
CELLS += [["Null?", "null"], ["Long?", "12345678901234567890123"], ["Two\nlines, and a comma", '"x"']]
TEXTS = [{"question": question, "answer": answer} for question, answer in CELLS[1:]]


def rows(kind, path, **spec):
    source = open_source(DataSpec(kind=kind, path=str(path), **spec))
    return [source[i] for i in range(len(source))]


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    module.disable_progress_bars()


def lines(items):
    return "".join(json.dumps(row) + "\n" for row in items).encode()


def cells(delimiter):
    import csv
    import io

    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows(CELLS)
    return text.getvalue().encode()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def parquet(path, table):
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ","), ("a.tsv.gz", "\t")]
)
def test_cells_are_the_texts_that_they_are(tmp_path, kind, name, delimiter):
    path = write(tmp_path / name, b"\xef\xbb\xbf" + cells(delimiter))
    assert rows(kind, path) == TEXTS
    assert rows(kind, path, split="train[1:3]") == TEXTS[1:3]


@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson"])
def test_lines_packed_or_not_are_the_same_rows(tmp_path, kind, name):
    path = write(tmp_path / name, lines(TEN))
    assert rows(kind, path) == TEN
    assert rows(kind, path, limit=3) == TEN[:3]


@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
def test_folder_and_pattern_are_all_their_files_in_the_order_of_names(tmp_path, kind):
    write(tmp_path / "d" / "b.jsonl", lines(TEN[5:]))
    write(tmp_path / "d" / "a.jsonl", lines(TEN[:5]))
    write(tmp_path / "d" / "README.md", b"no data")
    assert rows(kind, tmp_path / "d") == TEN
    assert rows(kind, tmp_path / "d" / "*.jsonl") == TEN
    assert rows(kind, tmp_path / "d" / "b.jsonl", split="train[-2:]") == TEN[8:]
    assert rows(kind, tmp_path / "d", split="train[4:6]", limit=1) == TEN[4:5]


@pytest.mark.parametrize(
    ("kind", "name"), [("jsonl", "jsonl"), ("huggingface", "jsonl"), ("huggingface", "csv")]
)
def test_files_of_a_folder_are_of_the_split_that_their_names_say(tmp_path, kind, name):
    def content(question):
        return lines([{"prompt": question}]) if name == "jsonl" else f"prompt\n{question}\n".encode()

    for split in ("train-00000-of-00002", "train-00001-of-00002", "test"):
        write(tmp_path / "d" / f"{split}.{name}", content(split))
    assert [row["prompt"][-1] for row in rows(kind, tmp_path / "d")] == ["2", "2"]
    assert rows(kind, tmp_path / "d", split="test") == [{"prompt": "test"}]
    with pytest.raises(UserError, match=r"data\..*'?validation"):
        rows(kind, tmp_path / "d", split="validation")


@pytest.fixture
def sources(tmp_path):
    """The same ten rows in every form that has no splits, and in one that has."""
    import datasets
    import pyarrow

    table = datasets.Dataset.from_list(TEN)
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([9])}).save_to_disk(str(tmp_path / "dict"))
    write(tmp_path / "a.jsonl", lines(TEN))
    write(tmp_path / "a.csv", b"prompt\n" + b"".join(row["prompt"].encode() + b"\n" for row in TEN))
    parquet(tmp_path / "a.parquet", pyarrow.Table.from_pylist(TEN))
    return tmp_path


SINGLE = [("jsonl", "a.jsonl"), ("jsonl", "a.csv"), ("huggingface", "a.jsonl"), ("huggingface", "a.csv")]
SINGLE += [("huggingface", "a.parquet"), ("huggingface", "saved")]


@pytest.mark.parametrize(("kind", "name"), [*SINGLE, ("huggingface", "dict")])
def test_slice_of_a_split_is_those_rows_in_every_source(sources, kind, name):
    for split, right in (
        ("train", TEN),
        ("train[:3]", TEN[:3]),
        ("train[80%:]", TEN[8:]),
        ("train[:1]+train[-1:]", [TEN[0], TEN[9]]),
    ):
        assert rows(kind, sources / name, split=split) == right, split


@pytest.mark.parametrize(("kind", "name"), SINGLE)
@pytest.mark.parametrize("split", ["test", "test[:2]", "train[:", "train[:3]+test", "train[20:]"])
def test_split_that_a_source_has_not_is_refused_never_replaced(sources, kind, name, split):
    with pytest.raises(UserError, match=r"data\.(split|path): ") as caught:
        rows(kind, sources / name, split=split)
    assert "\n" not in str(caught.value)


def test_saved_set_of_another_split_is_read_by_its_own_name_only(tmp_path):
    import datasets

    datasets.Dataset.from_list(TEN, split="test").save_to_disk(str(tmp_path / "saved"))
    assert rows("huggingface", tmp_path / "saved", split="test[:1]") == TEN[:1]
    with pytest.raises(UserError, match=r"data\.split: 'train', but these rows are all of the split 'test'"):
        rows("huggingface", tmp_path / "saved")


@pytest.mark.parametrize("split", ["train[:33%]", "train[33%:]", "train[-25%:]", "train[2:-2]", "train[:100]"])
def test_slices_are_those_of_datasets(split):
    from datasets import ReadInstruction

    (theirs,) = ReadInstruction.from_spec(split).to_absolute({"train": 7})
    assert list(rows_of(split, 7)) == list(range(theirs.from_, theirs.to))


def test_maps_of_parquet_become_objects_deep_down_too(tmp_path):
    import pyarrow

    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    table = pyarrow.table(
        {
            "prompt": ["a", "b"],
            "extra": pyarrow.array([[("k", "v")], None], kind),
            "deep": pyarrow.array([{"m": [("x", "y")]}, {"m": []}], pyarrow.struct([("m", kind)])),
        }
    )
    path = parquet(tmp_path / "a.parquet", table)
    assert rows("huggingface", path) == [
        {"prompt": "a", "extra": {"k": "v"}, "deep": {"m": {"x": "y"}}},
        {"prompt": "b", "extra": None, "deep": {"m": {}}},
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.gz", None, r"a\.jsonl\.gz' \("),
        ("a.csv", b"a,a\n1,2\n", "names a column twice"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a\.csv, row 2: 3 cells, but 2 columns"),
        ("a.csv", b"a,b\n\xff,2\n", "is not UTF-8"),
        ("a.csv", b"a,b\n", "holds no rows"),
        ("a.csv", b'a,b\n"x\n', "cannot be read"),
        ("a.parquet", b"PAR1", "set data.kind=huggingface"),
        ("d/x.md", b"no data", "no data files in it"),
    ],
)
def test_file_that_is_not_what_its_name_says_is_one_line(tmp_path, name, content, says):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(lines(TEN))[:-12] if content is None else content)
    with pytest.raises(UserError, match=says) as caught:
        rows("jsonl", path.parent if path.suffix == ".md" else path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "split"),
    [("huggingface", "a.csv", "train"), ("jsonl", "a.csv", "train"), ("jsonl", "a.jsonl", "train[:3]")],
)
def test_stream_refuses_what_it_cannot_read_in_order_as_it_is(sources, kind, name, split):
    from slipstream.prompts.sources.streams import open_rows

    with pytest.raises(UserError, match=r"data\.(stream|path)"):
        open_rows(DataSpec(kind=kind, path=str(sources / name), split=split, stream=True))


def test_hidden_files_and_caches_of_a_folder_are_no_data(tmp_path):
    for name in (".a.jsonl", "__pycache__/b.jsonl", ".git/c.jsonl", "d.jsonl"):
        write(tmp_path / name, lines(TEN))
    assert named_files(str(tmp_path)) == [tmp_path / "d.jsonl"]


def test_reading_cells_and_lines_needs_no_optional_package(tmp_path):
    path = write(tmp_path / "a.csv", cells(","))
    code = (
        "import sys; sys.modules['datasets'] = sys.modules['pyarrow'] = None\n"
        "from slipstream.prompts.sets import open_source; from slipstream.prompts.source_spec import DataSpec\n"
        f"print(len(open_source(DataSpec(kind='huggingface', path={str(path)!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(len(TEXTS)), done.stderr


def test_a_folder_of_other_files_names_the_kind_that_reads_them(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"holds other data files; set data\.kind=huggingface"):
        JsonLines(str(tmp_path))
