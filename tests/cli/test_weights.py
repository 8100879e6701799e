from __future__ import annotations

import pytest

from slipstream.cli.main import main
from slipstream.cli.weights import compare
from slipstream.weights.links.tcp.tcp_wire import FRAME_BYTES


@pytest.mark.parametrize(
    ("version", "fingerprint", "verdict", "same"),
    [
        (4, "bbb", "the same", True),
        (3, "aaa", "the same", True),
        (3, "bbb", "DIFFERS", False),
        (1, "ccc", "a version that the learner does not remember", True),
        (-1, "", "serves nothing yet", True),
    ],
)
def test_a_replica_is_held_against_the_version_that_it_says_it_serves(
    version, fingerprint, verdict, same, member
):
    learner = member("learner", "learner", 4, fingerprints={"3": "aaa", "4": "bbb"})
    replica = member("rollout-0", "rollout", version, fingerprint=fingerprint, deviation=0.0012)
    lines, found = compare([replica], [learner])
    assert found == same
    assert "version      4 bbb" in lines[0]
    assert verdict in lines[1]
    assert lines[1].endswith("within 0.0012")


def test_a_run_that_is_not_there_or_not_running_is_named(tmp_path, capsys):
    assert main(["weights", "verify", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.timeout(180)
def test_the_bench_prints_a_row_for_every_link(capsys):
    assert FRAME_BYTES < 9 << 20
    assert main(["weights", "bench", "--megabytes", "9", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [line.split()[:2] for line in lines if line[:4] in ("shm ", "tcp ", "tcp+", "file")]
    assert found == [[link, str(count)] for link in ("shm", "tcp", "tcp+key", "file") for count in (1, 3)]
