"""A flipped bit in the newest checkpoint: the run ends at once with the mend, and goes back when it is told to."""

from __future__ import annotations

import pytest

from slipstream.errors import EXIT_USER

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def test_a_flipped_bit_in_the_newest_checkpoint_asks_for_consent_and_no_more(stack, simulated):
    run = stack().up(*simulated, "run.steps=6")
    assert run.wait() == 0, run.text[-4000:]
    weights = run.folder / "checkpoints" / "step-00000006" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert run.resume("run.steps=8").wait() == EXIT_USER, run.text[-4000:]
    last = run.text.strip().splitlines()[-1]
    assert "step-00000006 cannot be used: model.safetensors has digest" in last
    assert f"slipstream resume {run.folder} --from step-00000003" in last
    assert "starting it again" not in run.text
    run.assert_gone()
    assert run.resume("--from", "step-00000003", "run.steps=8").wait() == 0, run.text[-4000:]
    assert "steps 4 to 6 are given up, with 6 groups" in run.text
    assert len(run.assert_exactly_once()) == 16
    assert "all of which moved the weights" in run.audit()
    assert [step["step"] for step in run.steps()] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]
    assert len({step["version"] for step in run.steps()}) == 11
    assert (run.folder / "checkpoints" / "given-up-step-00000006").is_dir()
    run.assert_gone()
