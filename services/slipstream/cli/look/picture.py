"""The picture that `top` draws: pure functions from a look at a run to something that rich can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.align import Align
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.cli.look.run_state import STOPPED, Look, newest_evaluations
from slipstream.cli.look.status import duration, stopped
from slipstream.ledger.counts import by_reason

_BLOCKS = "▁▂▃▄▅▆▇█"
_ACCENT, _QUIET, _GOOD, _BAD, _WARM = "cyan", "bright_black", "green", "red", "yellow"
KEYS = (("p", "pause / resume"), ("c", "save a checkpoint"), ("d", "drain and end"), ("q", "quit"))


@dataclass(frozen=True)
class View:
    """What is drawn.

    Attributes:
        look: The run now.
        rates: Per second since the look before, by process and by what: tokens, groups.
        note: What the last key did.
        ask: A key that waits to be pressed again, for what cannot be taken back.
        away: Why this is not what the run does now, if it is not.
    """

    look: Look
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    note: str = ""
    ask: str = ""
    away: str = ""


def picture(view: View, width: int = 100) -> RenderableType:
    """The whole screen."""
    curves = max(8, width // 2 - 28)
    return Group(
        _head(view.look, bool(view.away)),
        _side_by_side(_learning(view.look, curves), _soundness(view.look, curves)),
        _pipeline(view),
        _side_by_side(_replicas(view), _faults(view.look)),
        _foot(view),
    )


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """The newest values as block characters, the last one on the right; each column is a mean of a few."""
    if not values:
        return ""
    stride = -(-len(values) // width)
    columns = [
        sum(part) / len(part) for part in (values[at : at + stride] for at in range(0, len(values), stride))
    ]
    bottom = min(columns) if low is None else low
    top = max(columns) if high is None else high
    scale = (len(_BLOCKS) - 1) / (top - bottom) if top > bottom else 0.0
    return "".join(_BLOCKS[round(min(max(value - bottom, 0.0) * scale, len(_BLOCKS) - 1))] for value in columns)


def _head(look: Look, away: bool) -> RenderableType:
    state = look.state
    colours = {"running": _GOOD, "paused": _WARM, "finished": _ACCENT, "halted": _BAD, STOPPED: _BAD}
    colour = _BAD if away else colours[look.status]
    status = (
        f"{look.status} when last heard of" if away and look.status in ("running", "paused") else look.status
    )
    grid = Table.grid(expand=True)
    grid.add_column()
    grid.add_column(justify="right")
    title = Text.assemble(
        ("slipstream ", "bold"), (look.name, f"bold {_ACCENT}"), "  ", (f"● {status}", colour)
    )
    of = f" of {look.planned}" if look.planned else ""
    runs = look.status == "running" and not away
    left = f"   {duration(look.seconds_left)} left" if look.seconds_left and runs else ""
    grid.add_row(title, Text.assemble(f"step {state.step}{of}   version {state.version}", (left, _QUIET)))
    if not look.planned:
        return grid
    bar = ProgressBar(total=look.planned, completed=state.step, complete_style=_ACCENT, finished_style=_GOOD)
    line = Table.grid(expand=True)
    line.add_row(bar)
    return Group(grid, line)


def _learning(look: Look, width: int) -> Panel:
    table = _figures()
    rewards = [step["reward"] for step in look.steps]
    lengths = [step["length"] for step in look.steps]
    high = 1.0 if rewards and min(rewards) >= 0 and max(rewards) <= 1 else None
    _row(
        table,
        "reward",
        rewards,
        f"{look.last.get('reward', 0.0):.3f}",
        sparkline(rewards, width, 0.0 if high else None, high),
    )
    _row(table, "length", lengths, f"{look.last.get('length', 0.0):.0f}", sparkline(lengths, width, 0.0))
    for name, found in newest_evaluations(look.evaluations).items():
        table.add_row(
            Text(name[:12], _QUIET),
            f"{found['reward']:.3f}",
            Text(f"at step {found['step']}", _QUIET),
        )
    return _panel(table, "learning")


def _soundness(look: Look, width: int) -> Panel:
    table = _figures()
    ages = [step["age_mean"] for step in look.steps]
    bound = look.state.terms.max_staleness
    _row(
        table, "age", ages, f"{look.last.get('age_mean', 0.0):.1f}", sparkline(ages, width, 0.0, max(bound, 1))
    )
    for label, name in (
        ("eff. sample", "effective_tokens_ratio"),
        ("mismatch", "mismatch_k3_nats"),
        ("no signal", "zero_variance_ratio"),
    ):
        values = [
            v for step in look.steps if (v := step["metrics"].get(f"slipstream_objective_{name}")) is not None
        ]
        text = "" if not values else f"{values[-1]:.4f}" if "nats" in name else f"{values[-1]:.0%}"
        _row(table, label, values, text, sparkline(values, width, 0.0))
    return _panel(table, f"soundness (bound {bound})")


def _pipeline(view: View) -> Panel:
    """The stations with what lies in them, how fast they are, and how loaded."""
    look, groups, load = view.look, view.look.counts.groups, view.look.last.get("load", {})
    stations = [
        (
            "rollout",
            f"{groups['rolling']} in flight",
            _rate(view, "rollout", "tokens", "tok/s"),
            load.get("generate"),
        ),
        (
            "reward",
            f"{groups['scored']} scored",
            _rate(view, "reward", "groups", "groups/s"),
            load.get("reward"),
        ),
        ("buffer", f"{groups['buffered']} stored", f"{look.counts.open} of {look.state.terms.cap} open", None),
        ("learner", f"{groups['taken']} taken", f"{look.tokens_per_second:,.0f} tok/s", load.get("train")),
    ]
    grid = Table.grid(expand=True, padding=(0, 0))
    cells: list[RenderableType] = []
    for place, (role, depth, rate, loaded) in enumerate(stations):
        grid.add_column(ratio=4)
        cells.append(_station(look, role, depth, rate, loaded))
        if place < len(stations) - 1:
            grid.add_column(width=4)
            cells.append(Align.center(Text("\n──▶", _QUIET)))
    grid.add_row(*cells)
    limit = look.last.get("limit_ratio")
    weights = Text("  ◀── weights ──  ", _QUIET)
    what = "" if limit is None else f"limited by {look.last['bottleneck']}, {limit:.0%} of the speed limit"
    return _panel(Group(grid, Align.center(Text.assemble(weights, (what, _WARM)))), "pipeline")


def _station(look: Look, role: str, depth: str, rate: str, load: float | None) -> RenderableType:
    count = sum(member.role == role for member in look.members)
    limiting = {"generate": "rollout", "reward": "reward", "train": "learner"}.get(
        look.last.get("bottleneck", "")
    ) == role
    style = f"bold {_WARM if limiting else _ACCENT if count else _BAD}"
    lines = [Text(f"{role} ×{count}", style), Text(depth), Text(rate, _QUIET)]
    lines.append(Text("") if load is None else _bar(load))
    return Align.center(Group(*(Align.center(line) for line in lines)))


def _replicas(view: View) -> Panel:
    table = Table(box=None, expand=True, pad_edge=False, header_style=_QUIET, padding=(0, 1, 0, 0))
    for name, side in (
        ("replica", "left"),
        ("version", "right"),
        ("behind", "right"),
        ("tok/s", "right"),
        ("load", "left"),
    ):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for member in view.look.members:
        if member.role != "rollout":
            continue
        behind = view.look.state.version - member.version if member.version >= 0 else None
        style = _BAD if behind is not None and behind > view.look.state.terms.max_staleness else ""
        slots = member.detail.get("slots") or 0
        table.add_row(
            member.id,
            str(member.version) if member.version >= 0 else "–",
            Text("–" if behind is None else str(max(0, behind)), style),
            f"{view.rates.get(member.id, {}).get('tokens', 0.0):,.0f}",
            _bar(member.detail.get("load", 0.0) / slots, 5) if slots else Text(""),
        )
    return _panel(table, "generators")


def _faults(look: Look) -> Panel:
    counts, conservation = look.counts, look.counts.conservation()
    table = Table.grid(padding=(0, 1))
    holds = Text("holds", _GOOD) if conservation.holds else Text("DOES NOT HOLD", f"bold {_BAD}")
    table.add_row(Text("equation", _QUIET), holds)
    for label, reasons in (("dropped", counts.dropped), ("failed", counts.failed)):
        table.add_row(Text(label, _QUIET), Text(by_reason(reasons) or "none", _WARM if reasons else ""))
    recent = sum(step.get("unscored", 0) for step in look.steps[-20:])
    unscored = f"{by_reason(counts.unscored)}; {recent} of them in the last 20 steps" if counts.unscored else ""
    table.add_row(Text("unscored", _QUIET), Text(unscored or "none", _WARM if unscored else ""))
    for text in look.concerns:
        table.add_row(Text("warning", _QUIET), Text(text, _WARM))
    if look.state.failures_in_row:
        table.add_row(
            Text("failing", _QUIET),
            Text(f"{look.state.failures_in_row} in a row: {look.state.last_failure}", _BAD),
        )
    if look.missing:
        table.add_row(Text("missing", _QUIET), Text(", ".join(look.missing), _BAD))
    table.add_row(Text("checkpoint", _QUIET), f"step {look.state.durable_step}")
    return _panel(table, "faults")


def _foot(view: View) -> RenderableType:
    keys = Text("  ").join(Text.assemble((f" {key} ", "reverse"), f" {what}") for key, what in KEYS)
    note = Text(view.ask or view.note, f"bold {_WARM}" if view.ask else _QUIET)
    away = f"{view.away}\nif the run has ended, `slipstream report` shows it; q quits" if view.away else ""
    if view.look.status == STOPPED:
        away = stopped(view.look)
    return Group(keys, note, Text(away, _BAD))


def _side_by_side(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=Text(title, _QUIET), title_align="left", border_style=_QUIET, box=box.ROUNDED)


def _figures() -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=12)
    table.add_column(justify="right", width=8)
    table.add_column()
    return table


def _row(table: Table, label: str, values: Sequence[float], text: str, line: str) -> None:
    if values:
        table.add_row(Text(label, _QUIET), Text(text, "bold"), Text(line, _ACCENT))


def _rate(view: View, role: str, what: str, unit: str) -> str:
    names = [member.id for member in view.look.members if member.role == role]
    rate = sum(view.rates.get(name, {}).get(what, 0.0) for name in names)
    return f"{rate:,.0f} {unit}" if rate >= 10 else f"{rate:.1f} {unit}"


def _bar(share: float, width: int = 10) -> Text:
    full = round(min(1.0, max(0.0, share)) * width)
    return Text.assemble(("━" * full, _ACCENT), ("━" * (width - full), _QUIET), f" {share:.0%}")
