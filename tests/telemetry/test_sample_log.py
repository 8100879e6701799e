"""The samples file stays bounded and spans the whole run."""

from __future__ import annotations

from itertools import pairwise

from slipstream.run.folder import read_lines
from slipstream.telemetry.sample_log import SampleLog


def test_the_file_is_bounded_and_thinned_at_its_old_end(tmp_path):
    path = tmp_path / "samples.jsonl"
    cap = 20_000
    log = SampleLog(path, cap / (1 << 20))
    for step in range(1000):
        log.write({"step": step, "text": "x" * 80})
        assert path.stat().st_size <= cap
    steps = [record["step"] for record in read_lines(path)]
    assert steps == sorted(steps)
    assert steps[-1] == 999
    assert steps[0] < 100
    gaps = [after - before for before, after in pairwise(steps)]
    assert gaps[-1] == 1
    assert max(gaps[: len(gaps) // 4]) > 1


def test_a_record_larger_than_the_cap_does_not_grow_the_file_for_ever(tmp_path):
    path = tmp_path / "samples.jsonl"
    log = SampleLog(path, 0.001)
    for _ in range(5):
        log.write({"text": "x" * 5000})
    assert len(read_lines(path)) == 1


def test_what_cannot_be_written_is_told_once_and_harms_nothing(tmp_path, caplog):
    log = SampleLog(tmp_path / "no" / "folder.jsonl", 1)
    log.write({"step": 1})
    log.write({"step": float("nan")})
    assert len([record for record in caplog.records if "samples are not kept" in record.message]) <= 1
