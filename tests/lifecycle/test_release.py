"""A run is of one build: another is refused with both releases, or takes the whole run over by name."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from slipstream.errors import UserError
from slipstream.ledger.records import Member
from slipstream.lifecycle import site as site_module
from slipstream.lifecycle.life import Life
from slipstream.lifecycle.site import Site
from slipstream.run.provenance import release
from slipstream.telemetry.metrics import Metrics

OTHER = "0.0.1+0123456789ab"


class Book:
    """A ledger whose run is of these releases in turn, the last one for good."""

    def __init__(self, *releases: str) -> None:
        self.releases, self.joined = list(releases), list[Member]()

    async def state(self):
        found = self.releases.pop(0) if len(self.releases) > 1 else self.releases[0]
        return SimpleNamespace(terms=SimpleNamespace(release=found))

    async def join(self, member: Member) -> None:
        self.joined.append(member)

    async def leave(self, member_id: str) -> None: ...

    async def heartbeat(self, *told: object) -> None: ...


async def join(book: Book, accept: list[str]) -> None:
    async with AsyncExitStack() as stack:
        config = SimpleNamespace(run=SimpleNamespace(name="r", accept=accept))
        site = Site(config, "rollout-0", "rollout", Metrics(), Life(), stack)  # type: ignore[arg-type]
        site.ledger = book  # type: ignore[assignment]
        await site.join()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(site_module, "PEER_SECONDS", 0.0)


@pytest.mark.parametrize("opened", ["", release()])
async def test_the_same_build_joins(opened):
    book = Book(opened)
    await join(book, [])
    assert len(book.joined) == 1


async def test_another_build_is_refused_with_both_releases_and_changes_nothing():
    book = Book(OTHER)
    with pytest.raises(UserError) as refused:
        await join(book, [])
    assert OTHER in refused.value.problem
    assert release() in refused.value.problem
    assert "run.accept='[release]'" in refused.value.mend
    assert not book.joined


async def test_where_the_change_is_accepted_a_member_waits_until_the_learner_has_taken_the_run_over():
    book = Book(OTHER, OTHER, OTHER, release())
    await join(book, ["release"])
    assert len(book.joined) == 1


async def test_a_learner_that_never_takes_it_over_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(site_module, "OPEN_SECONDS", 0.0)
    with pytest.raises(UserError, match="release"):
        await join(Book(OTHER), ["release"])


def test_a_release_names_the_version_and_the_source():
    version, digest = release().split("+")
    assert version == "0.1.0"
    assert len(digest) == 12
    int(digest, 16)
