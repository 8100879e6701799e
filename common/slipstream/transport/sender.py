"""The sender: keeps each parcel until its reply and moves it from a lost peer to another.

Nothing here waits on a medium: a send that finds no room leaves the parcel waiting, and the next sign of life
of any peer, or the next tick, tries again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Self

from slipstream.errors import MessageError, SlipstreamError, TransportTimeout, UserError
from slipstream.protocol.messages import Frame
from slipstream.transport import queue_messages as wire
from slipstream.transport.base import REFUSED, Limits, Parcel, Peer, Reply, SenderOptions, SenderStats
from slipstream.transport.guard import Guard
from slipstream.transport.link import Dialer, Job, Link, explain

Queue = OrderedDict[str, Job]


class QueueSender:
    """The `Sender` of every medium; see `base.Sender` for the contract."""

    def __init__(self, options: SenderOptions, dialer: Dialer) -> None:
        self._options = options
        self._dialer = dialer
        self._jobs: dict[str, Job] = {}
        self._waiting: dict[str | None, Queue] = {}
        self._links: dict[str, Link] = {}
        self._delivered = self._resends = self._late = self._gaps = self._malformed = 0

    async def __aenter__(self) -> Self:
        self._guard = Guard(self._options.name)
        self._guard.on_fail(self._abandon)
        self._dialer.open(self._guard)
        self._guard.start(self._tick_forever, "ticker")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._guard.close()
        for link in self._links.values():
            self._hang_up(link)
        self._abandon(SlipstreamError(f"{self._options.name} is closed"))
        await self._dialer.close()

    async def run(self) -> None:
        """Wait until closed; raises the cause as soon as a background part dies."""
        await self._guard.wait()

    def set_peers(self, peers: Mapping[str, Peer]) -> None:
        """Replace the set of peers; what a removed or replaced peer held is sent to another."""
        self._guard.check()
        for name, link in list(self._links.items()):
            if peers.get(name) != link.peer:
                del self._links[name]
                self._hang_up(link)
                self._take_back(link)
        for name, peer in peers.items():
            if name not in self._links:
                self._links[name] = self._dial(name, peer)
        self._pump()

    async def deliver(self, parcel: Parcel, deadline: float, route: str | None = None) -> Reply:
        """Hand over a parcel and wait for its reply, for at most `deadline` seconds; see `base.Sender`."""
        self._guard.check()
        wire.check_words(parcel.id, parcel.kind)
        self._options.limits.check(parcel.frames)
        if parcel.id in self._jobs:
            raise SlipstreamError(f"{self._options.name}: parcel {parcel.id!r} is already being delivered")
        job = Job(parcel, route, self._guard.loop.create_future())
        self._jobs[parcel.id] = job
        self._queue(route)[parcel.id] = job
        try:
            self._pump()
            async with asyncio.timeout(deadline):
                return await job.future
        except TimeoutError:
            raise TransportTimeout(f"{self._options.name}: {explain(job, deadline, self._links)}") from None
        finally:
            self._forget(job)

    def stats(self) -> SenderStats:
        """Counts since the start, and the state of every peer."""
        waiting = sum(map(len, self._waiting.values()))
        return SenderStats(
            in_flight=len(self._jobs) - waiting,
            waiting=waiting,
            delivered=self._delivered,
            resends=self._resends,
            late=self._late,
            gaps=self._gaps,
            malformed=self._malformed,
            peers={name: link.stats() for name, link in self._links.items()},
        )

    def _dial(self, name: str, peer: Peer) -> Link:
        link = Link(name, peer)
        try:
            link.line = self._dialer.dial(peer, partial(self._on_message, link))
        except UserError as error:
            # A peer that registered nonsense must not take its healthy neighbours' sender down.
            link.state, link.trouble = "refused", str(error)
        return link

    def _hang_up(self, link: Link) -> None:
        if link.line is not None:
            link.line.close()
            link.line = None

    # -- what comes in

    def _on_message(self, link: Link, frames: list[Frame]) -> None:
        if link.line is None:
            return
        try:
            header = wire.decode_downward(frames)
            self._options.limits.check(frames[1:])
        except MessageError as error:
            self._malformed += 1
            link.trouble = str(error)
            return
        link.unanswered_pings, link.stalled = 0, False
        if isinstance(header, wire.Status):
            self._on_status(link, header)
        else:
            self._on_answer(link, header, frames[1:])
        self._pump()

    def _on_status(self, link: Link, status: wire.Status) -> None:
        link.window = status.credits
        link.limits = Limits(status.max_frames, status.max_frame_bytes, self._options.limits.max_bytes)
        if status.closing:
            self._suspect(link, "closing")
            self._send_ping(link)
            return
        self._revive(link)
        renewed = status.epoch != link.epoch
        lost = not renewed and status.replies != link.replies
        self._gaps += lost
        link.epoch, link.replies = status.epoch, status.replies
        if lost or renewed:
            self._send_again(link)

    def _on_answer(self, link: Link, answer: wire.Answer, frames: list[Frame]) -> None:
        if answer.seq == 0 and not answer.id:
            link.trouble = answer.reason
            return
        self._revive(link)
        lost = answer.seq not in (0, link.replies + 1)
        if answer.seq:
            link.replies, link.window = answer.seq, answer.credits
        self._take_in(link, answer.id, Reply(answer.status, answer.reason, frames))
        for parcel_id, status, reason in answer.more:
            self._take_in(link, parcel_id, Reply(status, reason))
        if lost:
            self._gaps += 1
            self._send_again(link)

    def _take_in(self, link: Link, parcel_id: str, reply: Reply) -> None:
        if reply.status == wire.BUSY:
            self._put_back(link, parcel_id)
        elif parcel_id in link.outstanding:
            del link.outstanding[parcel_id]
            self._settle(parcel_id, reply)
        else:
            self._late += 1

    def _revive(self, link: Link) -> None:
        """Any word from a peer makes it live; it gets back what no other peer has taken over."""
        if link.state == "live":
            return
        link.state, link.trouble = "live", ""
        for parcel_id in list(link.outstanding):
            job = self._jobs.get(parcel_id)
            if job is not None and job.link is None:
                self._queue(job.route).pop(parcel_id, None)
                job.link = link

    def _settle(self, parcel_id: str, reply: Reply) -> None:
        job = self._jobs.get(parcel_id)
        if job is None:
            self._late += 1
            return
        self._delivered += 1
        if not job.future.done():
            job.future.set_result(reply)
        self._forget(job)

    def _put_back(self, link: Link, parcel_id: str) -> None:
        """The peer had no room after all: it gets nothing more before its next word."""
        link.outstanding.pop(parcel_id, None)
        link.stalled = True
        job = self._jobs.get(parcel_id)
        if job is not None and job.link is link:
            self._wait_first([job])

    # -- what goes out

    def _pump(self) -> None:
        """Give waiting parcels to peers with credits until one of both runs out."""
        for route in list(self._waiting):
            queue = self._waiting[route]
            while queue and (link := self._pick(route)) is not None:
                job = next(iter(queue.values()))
                if job.future.done() or self._post(link, job):
                    queue.pop(job.parcel.id, None)
            if not queue:
                del self._waiting[route]

    def _pick(self, route: str | None) -> Link | None:
        links: Iterable[Link] = self._links.values()
        if route is not None:
            links = [self._links[route]] if route in self._links else []
        best = max(links, key=lambda link: link.free, default=None)
        return best if best is not None and best.free else None

    def _post(self, link: Link, job: Job) -> bool:
        """Send one parcel on a link; True when it need not wait any more."""
        parcel = job.parcel
        try:
            link.limits.check(parcel.frames)
            header = wire.encode(wire.Deliver(seq=link.sent + 1, id=parcel.id, kind=parcel.kind))
        except MessageError as error:
            self._settle(parcel.id, Reply(REFUSED, f"{link.name} does not take it: {error}"))
            return True
        if link.line is None or not link.line.send([header, *parcel.frames]):
            link.stalled = True
            return False
        link.sent += 1
        link.outstanding[parcel.id] = None
        self._resends += job.posted
        job.posted, job.link = True, link
        return True

    def _send_again(self, link: Link) -> None:
        """Repeat what the peer may have lost; what it did not lose it recognises by its id."""
        waiting, link.outstanding = list(link.outstanding), {}
        again = [job for id_ in waiting if (job := self._jobs.get(id_)) is not None and job.link is link]
        self._wait_first([job for job in again if not self._post(link, job)])

    def _take_back(self, link: Link) -> None:
        jobs = [self._jobs[id_] for id_ in link.outstanding if id_ in self._jobs]
        self._wait_first([job for job in jobs if job.link is link])

    def _suspect(self, link: Link, trouble: str) -> None:
        link.state, link.trouble = "suspect", trouble
        self._take_back(link)

    def _wait_first(self, jobs: list[Job]) -> None:
        """Put jobs back in front of those that were never sent, in their order."""
        for job in reversed(jobs):
            job.link = None
            queue = self._queue(job.route)
            queue[job.parcel.id] = job
            queue.move_to_end(job.parcel.id, last=False)

    def _queue(self, route: str | None) -> Queue:
        return self._waiting.setdefault(route, OrderedDict())

    # -- time and ends

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._options.ping_seconds)
            for link in list(self._links.values()):
                self._ping(link)
            self._pump()

    def _ping(self, link: Link) -> None:
        """Counting unanswered pings, not seconds, keeps a pause of our own from blaming the peers."""
        if link.line is None:
            return
        link.unanswered_pings += 1
        link.line.trouble()  # takes in what happened to the link, which would pile up otherwise
        if link.state == "live" and link.unanswered_pings > self._options.suspect_pings:
            self._suspect(link, f"{self._options.suspect_pings} pings unanswered")
        self._send_ping(link)

    def _send_ping(self, link: Link) -> None:
        if link.line is not None:
            link.line.send([wire.encode(wire.Ping(sent=link.sent, window=link.window))])

    def _forget(self, job: Job) -> None:
        if self._jobs.get(job.parcel.id) is job:
            del self._jobs[job.parcel.id]
            if job.route in self._waiting:
                self._waiting[job.route].pop(job.parcel.id, None)

    def _abandon(self, cause: BaseException) -> None:
        for job in self._jobs.values():
            if not job.future.done():
                job.future.set_exception(cause)
