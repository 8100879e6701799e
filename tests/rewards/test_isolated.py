"""Scorers that run in workers: `python`, `regex`, `reasoning_gym`."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from slipstream.rewards.base import Outcome, RewardSpec
from slipstream.rewards.builtin.python import find_code
from slipstream.rewards.scorers import Scorers
from slipstream.rewards.workers.worker_wire import ScoreReply, pack

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

Load = Callable[..., Scorers]
GOOD = "Here it is:\n```python\ndef f(x):\n    return x + 1\n```\nDone."
APART = subprocess.run(
    [
        sys.executable,
        "-c",
        "from slipstream.rewards.apart.trial import held; raise SystemExit(held().walls.kind == 'limits')",
    ],
    check=False,
)
needs_namespaces = pytest.mark.skipif(APART.returncode != 0, reason="this system allows no namespaces")
TESTS = {"tests": ["assert f(1) == 2", "assert f(-1) == 0"]}


def test_code_is_the_last_fenced_block() -> None:
    assert find_code("```python\na\n```\nor\n```py\nb\n```") == "b"
    assert find_code("```\na = 1") == "a = 1"
    assert find_code("a = 1") == "a = 1"


async def test_programs_pass_or_fail_their_tests(scorers: Load) -> None:
    programs = {
        GOOD: 1,
        "def f(x): return x": 0,
        "def f(x: return": 0,
        "": 0,
        # Leaving before the tests is no pass.
        "import os; os._exit(0)": 0,
        "raise SystemExit(0)": 0,
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": 0,
        # Another program's traces are gone, and so are the parent's secrets and the network.
        "import builtins\nassert not hasattr(builtins, 'left')\nbuiltins.left = 1\ndef f(x): return x + 1": 1,
        "import os\nassert 'SECRET' not in os.environ\ndef f(x): return x + 1": 1,
        "import sys\nprint('x' * 5000, file=sys.stderr)\ndef f(x): return x + 1": 1,
        "print('x' * 10**8)\ndef f(x): return x + 1": 0,
    }
    loaded = scorers(RewardSpec("python", timeout_seconds=60))
    scored = await loaded.score_group("p", list(programs), TESTS)
    assert {program: sample.reward for program, sample in zip(programs, scored, strict=True)} == programs
    assert not any(sample.unscored for sample in scored)


async def test_the_environment_is_bare(scorers: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    code = "import os\nassert 'SECRET' not in os.environ\nassert os.listdir('.') == []\ndef f(x): return x + 1"
    scored = await scorers(RewardSpec("python", timeout_seconds=60)).score_group("p", [code], TESTS)
    assert scored[0].reward == 1.0


@pytest.mark.parametrize(
    ("code", "seconds", "flag"),
    [
        ("while True: pass", 1.0, "python:timeout"),
        ("x = [0] * 10**10\ndef f(x): return x + 1", 60.0, "python:memory"),
    ],
)
async def test_a_program_over_its_limits_scores_0(scorers: Load, code: str, seconds: float, flag: str) -> None:
    """Case 2 and Case 3, for a program."""
    loaded = scorers(RewardSpec("python", timeout_seconds=seconds))
    scored = (await loaded.score_group("p", [code], TESTS))[0]
    assert (scored.reward, scored.flags) == (0.0, (flag,))


@needs_namespaces
async def test_a_program_has_no_network(scorers: Load) -> None:
    code = "import socket\nsocket.create_connection(('127.0.0.1', {port}), 30)\ndef f(x): return x + 1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 5):
            pass
        scored = await scorers(RewardSpec("python", timeout_seconds=60)).score_group(
            "p", [code.format(port=port)], TESTS
        )
    assert scored[0].reward == 0.0


@needs_namespaces
async def test_a_process_that_a_program_leaves_behind_dies_with_it(scorers: Load) -> None:
    code = (
        "import subprocess\nsubprocess.Popen(['sleep', '4711'], start_new_session=True)\ndef f(x): return x + 1"
    )
    loaded = scorers(RewardSpec("python", timeout_seconds=60))
    assert (await loaded.score_group("p", [code], TESTS))[0].reward == 1.0
    await loaded.close()
    async with asyncio.timeout(60):
        while sleepers():  # noqa: ASYNC110  (killed, and gone when the system has reaped it)
            await asyncio.sleep(0.05)


def sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4711"]]


async def test_a_row_without_tests_is_unscored(scorers: Load) -> None:
    loaded = scorers(RewardSpec("python", timeout_seconds=60))
    assert (await loaded.score_group("p", [GOOD], {"tests": ""}))[0].unscored == "exception"
    assert (await loaded.score_group("p", [GOOD], {}))[0].unscored == "exception"


async def test_regex_rewards_a_form(scorers: Load) -> None:
    """Case 7: the instruction's own box earns no format reward."""
    loaded = scorers(RewardSpec("regex", name="format", options={"pattern": r"\\boxed\{.+\}"}))
    scored = await loaded.score_group(
        r"Answer within \boxed{4}.", ["I don't know.", "so\n" + r"\boxed{4}"], {"answer": "4"}
    )
    assert [sample.reward for sample in scored] == [0.0, 1.0]


async def test_a_pattern_that_never_ends_is_stopped(scorers: Load) -> None:
    options = {"pattern": "(a+)+b", "full": True}
    loaded = scorers(RewardSpec("regex", timeout_seconds=3.0, options=options))
    scored = await loaded.score_group("p", ["a" * 60, "aab"], {})
    assert [sample.unscored for sample in scored] == ["timeout", ""]
    assert scored[1].reward == 1.0


async def test_reasoning_gym_counts_only_a_full_score(scorers: Load) -> None:
    pytest.importorskip("reasoning_gym")
    columns: dict[str, Any] = {"answer": "1", "metadata": {"source_dataset": "chain_sum"}}
    texts = ["1", "<answer>1</answer>", "so <answer> 1 </answer>", "11", "no"]
    loaded = scorers(
        RewardSpec("reasoning_gym", timeout_seconds=90),
        RewardSpec(
            "reasoning_gym",
            name="part",
            weight=0.0,
            options={"partial": True, "task": "chain_sum"},
            timeout_seconds=90,
        ),
    )
    await loaded.start()
    scored = await loaded.score_group("p", texts, columns)
    assert [sample.reward for sample in scored] == [1, 1, 1, 0, 0]
    assert scored[3].components["part"] == 0.5


async def test_a_reasoning_gym_scorer_that_throws_gives_0_and_a_flag(scorers: Load) -> None:
    pytest.importorskip("reasoning_gym")
    options = {"task": "prime_factorization"}
    columns = {"answer": "2 × 3", "metadata": '{"number": 6, "factors": [2, 3]}'}
    loaded = scorers(RewardSpec("reasoning_gym", options=options, timeout_seconds=90))
    await loaded.start()
    scored = await loaded.score_group("p", ["zzz", "2 × 3"], columns)
    assert [sample.reward for sample in scored] == [0.0, 1.0]
    assert scored[0].flags == ("reasoning_gym:scorer_raised",)


FORGER = """
import json, os, struct, sys
frame = {frame!r}
for number in range(256):
    for text in (frame, b'{{"status": "ran"}}\\n', b'{{"token": ""}}\\n', b"\\n"):
        try:
            os.write(number, text)
        except OSError:
            pass
os._exit(0)
"""
ALONE = """
import ctypes, os, stat
held = [n for n in range(256) if os.path.exists(f"/proc/self/fd/{n}")]
assert len(held) <= 4, held
worker = os.getppid() or 1
for path in (f"/proc/{worker}/fd/3", f"/proc/{worker}/mem", f"/proc/{worker}/environ"):
    try:
        open(path, "rb").read(1)
    except OSError:
        continue
    raise AssertionError(path)
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PIDFD_OPEN, PIDFD_GETFD = 16, 434, 438
assert libc.ptrace(PTRACE_ATTACH, worker, 0, 0) == -1
pidfd = libc.syscall(PIDFD_OPEN, worker, 0)
if pidfd >= 0:
    taken = [n for n in range(64) if libc.syscall(PIDFD_GETFD, pidfd, n, 0) >= 0]
    assert not taken, taken
def f(x): return x + 1
"""


async def test_a_completion_cannot_forge_its_reward(scorers: Load) -> None:
    """It writes replies in every form to every descriptor that it has, and leaves before the tests."""
    outcomes = [Outcome(value=float("nan"), components={"forged": 1e308})]
    frames = [pack(ScoreReply(number=number, outcomes=outcomes)) for number in range(4)]
    program = FORGER.format(frame=b"".join(frames))
    loaded = scorers(RewardSpec("python", timeout_seconds=60), workers=2)
    scored = await loaded.score_group("p", [program, GOOD, program], TESTS)
    assert [sample.reward for sample in scored] == [0.0, 1.0, 0.0]
    assert all(sample.components == {"python": sample.reward} for sample in scored)


PATCHES = {
    "the runner": "import __main__\n__main__._run = lambda piece, space: {'status': 'ran', 'token': piece['token']}",
    "exec": "import builtins\nbuiltins.exec = lambda *_: None",
    "compile": "import builtins\nkept = compile\nbuiltins.compile = lambda code, *more: kept('', *more)",
    "what tests call": "import builtins\nbuiltins.abs = lambda _: 0",
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
async def test_what_a_completion_does_to_the_runner_and_the_built_ins_is_not_for_the_tests(
    scorers: Load, patch: str
) -> None:
    tests = {"tests": "assert abs(f(1) - 2) == 0"}
    loaded = scorers(RewardSpec("python", timeout_seconds=60))
    scored = await loaded.score_group("p", [f"{patch}\ndef f(x): return 7", f"{patch}\n{GOOD}"], tests)
    assert [sample.reward for sample in scored] == [0.0, 1.0]


async def test_built_ins_that_the_rows_set_up_code_changes_stay_changed(scorers: Load) -> None:
    columns = {"tests": "assert f() == 'given'", "before": "import builtins\nbuiltins.input = lambda: 'given'"}
    loaded = scorers(RewardSpec("python", timeout_seconds=60, options={"setup_column": "before"}))
    assert (await loaded.score_group("p", ["def f(): return input()"], columns))[0].reward == 1.0


async def test_a_program_shares_no_descriptor_with_the_service(scorers: Load) -> None:
    loaded = scorers(RewardSpec("python", timeout_seconds=60))
    scored = (await loaded.score_group("p", [ALONE], TESTS))[0]
    assert (scored.reward, scored.detail) == (1.0, "")


async def test_a_program_cannot_see_the_tests_before_they_run(scorers: Load) -> None:
    code = (
        "import sys, gc\nframe, seen = sys._getframe(), ''\n"
        "while frame: seen += repr(frame.f_locals); frame = frame.f_back\n"
        "assert 'f(-' + '1)' not in seen\ndef f(x): return x + 1"
    )
    scored = await scorers(RewardSpec("python", timeout_seconds=60)).score_group("p", [code], TESTS)
    assert scored[0].reward == 1.0


async def test_set_up_code_that_fails_is_unscored_and_only_the_row_can_say_so(scorers: Load) -> None:
    columns = TESTS | {"before": "raise KeyError('gone')"}
    loaded = scorers(RewardSpec("python", timeout_seconds=60, options={"setup_column": "before"}))
    scored = (await loaded.score_group("p", [GOOD], columns))[0]
    assert (scored.reward, scored.unscored) == (None, "exception")
    assert "KeyError('gone')" in scored.detail
