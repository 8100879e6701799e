"""What `math` hands to the library, in its killable process."""

import asyncio
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from slipstream.rewards.base import RewardSpec
from slipstream.rewards.scorers import Scorers

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CASES = [
    (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt{3}}}", 1),
    (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt{2}}}", 0),
    ("x+1", r"\boxed{1+x}", 1),
    ("x=5", r"\boxed{5}", 1),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
    ("1,2", r"\boxed{2,1}", 1),
    ("[0,1]", r"\boxed{(0,1)}", 0),
    (r"2^{10}", r"\boxed{1024}", 1),
    # Case 18: the library by itself reads 1e-3 as e - 3.
    ("e-3", r"\boxed{1e-3}", 0),
    ("e-3", r"\boxed{-3+e}", 1),
    # Case 21: the library by itself rounds both to 0.
    (r"\frac{1}{2^{98}}", r"\boxed{1/2^{99}}", 0),
    (r"\frac{1}{2^{98}}", r"\boxed{1/2^{98}}", 1),
    (r"\sqrt{2}\cdot 2^{-98}", r"\boxed{\sqrt{2}\cdot 2^{-99}}", 0),
    # Nothing that can be read.
    ("x+1", r"\boxed{}", 0),
    ("x+1", r"\boxed{\frac{}{}}", 0),
]


async def test_answers_that_are_no_plain_numbers(scorers: Callable[..., Scorers]) -> None:
    loaded = scorers(RewardSpec("math"))
    await loaded.start()
    found = [
        (gold, text, (await loaded.score_group("p", [text], {"answer": gold}))[0].reward)
        for gold, text, _ in CASES
    ]
    assert found == CASES


async def test_the_library_works_for_a_caller_off_the_main_thread() -> None:
    """Case 1: no alarm signal is involved, here or in the worker."""

    async def run() -> float | None:
        scorers = Scorers.load([RewardSpec("math")])
        try:
            columns = {"answer": r"\frac{\sqrt{3}}{3}"}
            scored = await scorers.score_group("p", [r"\boxed{\frac{1}{\sqrt{3}}}"], columns)
        finally:
            await scorers.close()
        return scored[0].reward

    assert await asyncio.to_thread(lambda: asyncio.run(run())) == 1.0


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "((((9^9)^9)^9)^9)^9!", r"\log(9^{9^{9}})"])
async def test_a_monster_of_an_answer_scores_0_and_ends_its_worker(
    scorers: Callable[..., Scorers], answer: str
) -> None:
    """Case 3: `timeout` or `memory`, 0 for the model's answer, memory of the service flat."""
    loaded = scorers(RewardSpec("math", timeout_seconds=12.0))
    await loaded.start()
    own = psutil.Process().memory_info().rss
    scored = (await loaded.score_group("p", [rf"\boxed{{{answer}}}"], {"answer": r"\sqrt{2}"}))[0]
    assert (scored.reward, scored.unscored) == (0.0, "")
    assert psutil.Process().memory_info().rss - own < 50 << 20
    again = await loaded.score_group("p", [r"\boxed{1+x}"], {"answer": "x+1"})
    assert again[0].reward == 1.0


async def test_a_monster_can_be_left_unscored(scorers: Callable[..., Scorers]) -> None:
    """The policy is data: the spec may say otherwise."""
    loaded = scorers(RewardSpec("math", timeout_seconds=0.5, on_timeout="unscored"))
    await loaded.start()
    scored: Any = (await loaded.score_group("p", [r"\boxed{9^{9^{9}}}"], {"answer": "5"}))[0]
    assert (scored.reward, scored.unscored) == (None, "timeout")
