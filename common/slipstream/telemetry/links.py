"""The state of a process's data links as metrics: depths and credits, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from slipstream.telemetry.registry import Metrics
from slipstream.transport.base import Receiver, ReceiverStats, Sender, SenderStats

_Read = Callable[[Any], float]


def show_links(metrics: Metrics, senders: Mapping[str, Sender], receivers: Sequence[Receiver]) -> None:
    """Show what these links say, and those that are added to them later."""
    for kind, name, what, read in _SENDER:
        metrics.pulled(kind, name, what, _of_senders(senders, read), "to")
    for kind, name, what, read in _RECEIVER:
        metrics.pulled(kind, name, what, _of_receivers(receivers, read))


def _of_senders(
    senders: Mapping[str, Sender], read: _Read
) -> Callable[[], Iterable[tuple[Sequence[str], float]]]:
    return lambda: [((to,), read(sender.stats())) for to, sender in list(senders.items())]


def _of_receivers(
    receivers: Sequence[Receiver], read: _Read
) -> Callable[[], Iterable[tuple[Sequence[str], float]]]:
    return lambda: [((), read(receiver.stats())) for receiver in list(receivers)]


def _live(stats: SenderStats) -> float:
    return sum(peer.state == "live" for peer in stats.peers.values())


def _credits(stats: SenderStats) -> float:
    return sum(peer.credits for peer in stats.peers.values())


def _refused(stats: ReceiverStats) -> float:
    return stats.refused + stats.denied


_Kind = Literal["counter", "gauge"]
_SENDER: tuple[tuple[_Kind, str, str, _Read], ...] = (
    ("gauge", "link_live_peers", "processes of that role that can be sent to", _live),
    ("gauge", "link_credits", "parcels that may be sent now; 0 with some waiting is back-pressure", _credits),
    ("gauge", "link_waiting_parcels", "parcels that wait for a credit", lambda stats: stats.waiting),
    ("gauge", "link_in_flight_parcels", "parcels sent and not answered", lambda stats: stats.in_flight),
    ("counter", "link_delivered_total", "parcels answered", lambda stats: stats.delivered),
    ("counter", "link_resends_total", "parcels sent again", lambda stats: stats.resends),
    ("counter", "link_malformed_total", "messages from peers that could not be read", lambda s: s.malformed),
)
_RECEIVER: tuple[tuple[_Kind, str, str, _Read], ...] = (
    ("gauge", "inbox_unread_parcels", "parcels received and not yet looked at", lambda stats: stats.unread),
    ("gauge", "inbox_in_progress_parcels", "parcels being worked on", lambda stats: stats.in_progress),
    ("counter", "inbox_completed_total", "parcels answered", lambda stats: stats.completed),
    (
        "counter",
        "inbox_repeated_total",
        "parcels that came again and got their answer again",
        lambda s: s.repeated,
    ),
    ("counter", "inbox_refused_total", "messages refused by the transport", _refused),
)
