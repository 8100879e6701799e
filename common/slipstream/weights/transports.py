"""Which transports a run's config opens, on the learner's and on a replica's side."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import socket
from collections.abc import Sequence

from slipstream.config.sections.services_config import WeightsSection
from slipstream.errors import UserError
from slipstream.lifecycle.address import announced_host
from slipstream.transport.zeromq.keys import KeyPair
from slipstream.weights.base import Publisher, Puller, Server, Subscriber, VersionStore
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.links.pulling import AutoSubscriber, PullSubscriber
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.manifest import Layout

log = logging.getLogger("slipstream.weights")


def host_name(settings: WeightsSection) -> str:
    """Name of this host among those of the run."""
    return settings.host or socket.gethostname()


def open_publisher(
    run: str,
    incarnation: int,
    layout: Layout,
    settings: WeightsSection,
    *,
    address: str = "127.0.0.1",
    threads: int = 2,
    keys: KeyPair | None = None,
) -> Publisher:
    """The publisher of a run. Shared memory is always there: it is what every other transport reads from.

    Args:
        run: Name of the run. incarnation: Which start of the learner this is. layout: The run's layout.
        settings: The config's `weights`. address: Where servers listen (`network.host`).
        threads: Threads that copy and digest.
        keys: The run's CURVE key; with one, only its holders are served over TCP.

    Raises:
        UserError: A port that is taken, a part that is not installed, or not enough space for two versions.
    """
    from slipstream.weights.links.serving import ServingPublisher

    shm = ShmPublisher(run, incarnation, layout, threads=threads, keep_seconds=settings.keep_seconds)
    shelf = Shelf()
    servers: list[Server] = []
    stores: list[VersionStore] = []
    try:
        for index, scheme in enumerate(schemes(settings, address, keys is not None)):
            port = settings.port + index if settings.port else 0
            if scheme == "file":
                stores.append(_file_store(settings, run, incarnation))
            else:
                servers.append(open_server(scheme, shelf, settings, address, port, keys))
        if not servers and not stores:
            return shm
        return ServingPublisher(shm, shelf, servers, stores, settings.dense_every if settings.delta else 0)
    except BaseException:
        for server in servers:
            server.close()
        shm.close()
        raise


def open_subscriber(
    settings: WeightsSection,
    *,
    address: str = "127.0.0.1",
    expected: Layout | None = None,
    threads: int = 1,
    keys: KeyPair | None = None,
) -> Subscriber:
    """The subscriber of a replica; `auto` maps what lies on this host and pulls the rest.

    Raises:
        UserError: A part that is not installed.
    """
    if settings.transport == "shm":
        return ShmSubscriber(expected=expected, threads=threads)
    wanted = schemes(settings, address, keys is not None)
    pullers = [open_puller(scheme, settings, keys) for scheme in (wanted or ["tcp"])]
    passing = [scheme for scheme in wanted if scheme != "file"]
    pull = PullSubscriber(
        pullers,
        expected=expected,
        threads=threads,
        host=host_name(settings),
        serve=(lambda shelf: open_server(passing[0], shelf, settings, address, 0, keys)) if passing else None,
    )
    if settings.transport != "auto":
        return pull
    return AutoSubscriber(ShmSubscriber(expected=expected, threads=threads), pull)


def schemes(settings: WeightsSection, address: str, keyed: bool = False) -> Sequence[str]:
    """The transports beside shared memory, the preferred first.

    Under `auto` these are, where other hosts can reach this one: ucx if it is installed, and tcp; and files, if
    `weights.folder` is set. A run that is `keyed` shall be encrypted, which over ucx the weights are not: there auto
    takes ucx only with `weights.allow_unencrypted`.
    """
    if settings.transport != "auto":
        return [] if settings.transport == "shm" else [settings.transport]
    links = [] if _is_loopback(address) else ["tcp"]
    if links and importlib.util.find_spec("ucxx") is not None:
        if settings.allow_unencrypted or not keyed:
            links.insert(0, "ucx")
        else:
            log.info(
                "weights: ucx is installed and not used, for it would send the weights of a run with a key as they "
                "are; weights.allow_unencrypted=true uses it"
            )
    return [*links, "file"] if settings.folder else links


def open_server(
    scheme: str, shelf: Shelf, settings: WeightsSection, address: str, port: int, keys: KeyPair | None = None
) -> Server:
    """The offering end of a transport; with the run's key, requests (and over TCP the bytes) go through CURVE."""
    from slipstream.weights.links.control import ServerOptions
    from slipstream.weights.links.tcp.stream_server import StreamServer
    from slipstream.weights.links.tcp.tcp_server import WeightServer

    allowed = {keys.public} if keys else ()
    options = ServerOptions(address, port, _advertised(address), keys, allowed)
    if scheme == "ucx":
        from slipstream.weights.links.ucx.ucx_server import UcxServer

        return UcxServer(shelf, options, settings.frame_seconds)
    if scheme == "nccl":
        from slipstream.weights.links.nccl import NcclServer

        return NcclServer(shelf, options, settings.frame_seconds)
    if keys is not None:
        return WeightServer(shelf, options)
    return StreamServer(shelf, address, port, _advertised(address))


def open_puller(scheme: str, settings: WeightsSection, keys: KeyPair | None = None) -> Puller:
    """The fetching end of a transport."""
    from slipstream.weights.links.control import Dial
    from slipstream.weights.links.folder_link import FilePuller
    from slipstream.weights.links.tcp.tcp_pull import TcpPuller
    from slipstream.weights.links.ucx.ucx_pull import UcxPuller

    if scheme == "file":
        return FilePuller()
    if scheme == "nccl":
        from slipstream.weights.links.nccl import NcclPuller

        return NcclPuller(settings.frame_seconds)
    dial = Dial(keys, keys.public if keys else "", settings.frame_seconds)
    return UcxPuller(dial) if scheme == "ucx" else TcpPuller(dial)


def _file_store(settings: WeightsSection, run: str, incarnation: int) -> VersionStore:
    from slipstream.weights.links.folder_link import FileStore

    if not settings.folder:
        raise UserError("weights.transport file needs weights.folder", "set it to a folder that all hosts see")
    return FileStore(settings.folder, run, incarnation)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _advertised(address: str) -> str:
    """What others dial: of an address that stands for all of this host's, one that they can reach."""
    return announced_host(address)
