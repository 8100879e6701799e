"""A run whose prompts are drawn from a stream: stopped and killed in the middle, each prompt is trained once."""

from __future__ import annotations

import json
import os
import random
import signal

import pytest

from slipstream.learner.checkpoint.finding import newest_complete

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def test_a_streamed_run_goes_on_exactly_where_it_was(stack, simulated, tmp_path):
    """Case 84."""
    digits = random.Random(0)
    prompts = ["".join(digits.choices("0123456789", k=6)) + ">" for _ in range(48)]
    rows = [json.dumps({"prompt": prompt, "answer": "".join(sorted(prompt[:6]))}) for prompt in prompts]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    data = ["data.kind=jsonl", f"data.path={tmp_path}/rows.jsonl", "data.stream=true", "data.limit=24"]
    settings = ["data.holdout=0", "data.options={}", "run.steps=null", "run.epochs=2"]
    run = stack().up(*simulated, *data, *settings, "rollout.engine.options.step_seconds=0.05")
    for reached, number in [(3, signal.SIGTERM), (9, signal.SIGKILL)]:
        run.until_step(reached)
        os.kill(run.process.pid, number)
        run.wait()
        run.assert_gone()
        kept = newest_complete(run.folder / "checkpoints").path / "stream.json"
        assert 0 <= json.loads(kept.read_text())["position"] <= 24
        run.resume()
    assert run.wait() == 0, run.text[-4000:]
    assert run.assert_exactly_once() == list(range(48))
    run.assert_gone()
