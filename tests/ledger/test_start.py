"""The server under the book: what is refused at start, and what happens when it is full."""

from __future__ import annotations

import os
import stat

import pytest
import redis

from slipstream.errors import LedgerError, UserError
from slipstream.ledger import connection
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import LedgerFull
from slipstream.ledger.server import embedded_server


async def test_any_policy_that_may_evict_is_refused(make_server):
    """Case 100."""
    server = make_server("--maxmemory-policy", "allkeys-lru")
    with pytest.raises(
        UserError, match=r"maxmemory-policy is 'allkeys-lru'.*set maxmemory-policy to noeviction"
    ):
        await Ledger.connect(server.url, "r", deadline=50)


async def test_a_full_server_stops_producers_and_lets_work_finish(make_server, terms, replica):
    """Case 100."""
    server = make_server()
    async with await Ledger.connect(server.url, "r", deadline=50) as ledger:
        await ledger.open_run(terms())
        await ledger.claim_learner("L")
        await ledger.join(replica())
        await ledger.admit("g0", 1, 0)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", 1)
        with pytest.raises(LedgerFull, match="maxmemory"):
            await ledger.admit("g0", 1, 0)
        await ledger.heartbeat("g0")
        async with await Ledger.connect(server.url, "r", deadline=50) as restarted:
            await restarted.open_run(terms())
            await restarted.join(replica(incarnation="b", name="g1"))
        await ledger.buffered(0, 0, "g0", "b0", 0, 0, 1, True)
        await ledger.take(1, [(0, 0)], "L")
        await ledger.commit(1, 1, "L")
        await ledger.durable(1, "L")


class OldServer:
    """Answers INFO as a server of another kind would."""

    def __init__(self, **info):
        self._info = info

    async def info(self):
        return self._info


class BreakingServer(OldServer):
    """Breaks the connection the first times that the library is loaded."""

    def __init__(self, breaks):
        super().__init__(redis_version="7.2.0")
        self.breaks = breaks

    async def function_load(self, code):
        self.breaks -= 1
        if self.breaks >= 0:
            raise redis.exceptions.ConnectionError("Connection closed by server.")


async def test_a_connection_that_breaks_at_the_start_is_tried_again_until_the_deadline():
    server = BreakingServer(breaks=2)
    await connection.check_server(server, "redis://x", 30.0)
    assert server.breaks == -1
    with pytest.raises(LedgerError, match=r"redis\.url: the server at redis://x went away"):
        await connection.check_server(BreakingServer(breaks=1000), "redis://x", 0.1)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"redis_version": "6.2.14"}, "version 6.2.14; Redis 7.0 or Valkey is needed"),
        ({"redis_version": "7.2.4", "redis_mode": "cluster"}, "cluster mode"),
    ],
)
async def test_servers_that_cannot_hold_the_book_are_refused(info, words):
    with pytest.raises(UserError, match=words):
        await connection.check_server(OldServer(**info), "redis://x", 1)


async def test_a_user_without_permission_for_functions_is_refused(make_server):
    server = make_server()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "weak", "on", ">pw", "~*", "+@all", "-function")
    url = server.url.replace("unix://", "unix://weak:pw@")
    with pytest.raises(UserError, match=r"redis.url: its user may not load functions.*\+function\|load"):
        await Ledger.connect(url, "r", deadline=50)


async def test_the_password_is_asked_for_and_shows_in_no_command_line(make_server, tmp_path):
    server = make_server(password='a "secret" \\ word')
    async with await Ledger.connect(server.url, "r", password='a "secret" \\ word', deadline=50) as ledger:
        assert await ledger.members() == []
    for wrong in (None, "guess"):
        with pytest.raises(UserError, match=r"redis\.url: the password"):
            await Ledger.connect(server.url, "r", password=wrong, deadline=50)
    tmp_path.chmod(0o755)
    how = embedded_server(tmp_path, password="secret")
    assert "secret" not in " ".join(how.command)
    assert stat.S_IMODE(os.stat(how.command[1]).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path).st_mode) == 0o700  # whatever the server writes there
    with pytest.raises(UserError, match="line break"):
        embedded_server(tmp_path, password="secret\nport 1")


async def test_the_server_listens_on_this_host_only(make_server):
    server = make_server(tcp=True)
    with redis.Redis.from_url(server.url) as client:
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert client.config_get("appendfsync") == {"appendfsync": "always"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


@pytest.mark.parametrize("url", ["http://localhost", "localhost:6379"])
async def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(UserError, match=r"redis\.url is"):
        await Ledger.connect(url, "r")


async def test_nobody_there_is_said_at_the_deadline(tmp_path):
    with pytest.raises(LedgerError, match=r"redis\.url: no server answers at unix://.* within 0\.2 s"):
        await Ledger.connect(f"unix://{tmp_path}/none", "r", deadline=0.2)


async def test_two_releases_of_the_library_serve_one_run(server, terms, monkeypatch):
    async with await Ledger.connect(server.url, "two-releases", deadline=50) as ours:
        await ours.open_run(terms())
        source = connection.library()[1].split("\n", 2)[2]
        release = ("other", f"#!lua name=slipstream_other\nlocal RELEASE = 'other'\n{source}")
        monkeypatch.setattr(connection, "library", lambda: release)
        async with await Ledger.connect(server.url, "two-releases", deadline=50) as theirs:
            await theirs.pause()
            assert (await ours.state()).status == "paused"
