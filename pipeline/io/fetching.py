"""Fetches files over HTTP from hosts that an operator lists, and never from addresses that are not public.

An address may come from anybody: without these checks it could reach what only this machine sees.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from drafter.errors import RequestError, one_line, shown
from pipeline.errors import UnavailableError

_PORTS = {"http": 80, "https": 443}
_MOST_HOPS = 4
_MOVED = (301, 302, 303, 307, 308)
_SECONDS = 20.0
_PIECE = 64 << 10
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that gateways translate to the IPv4 address in their last four bytes."""
_INTERNET = ipaddress.ip_network("2000::/3")
"""All IPv6 addresses that are given to hosts of the internet. Others may be those of a site's own gateways."""


def is_web(address: str) -> bool:
    return address[:8].lower().startswith(("http://", "https://"))


def fetch_web(address: str, most: int, hosts: Collection[str], seconds: float = _SECONDS) -> bytes:
    """Return the content of an HTTP address, of at most `most` bytes.

    Args:
        hosts: The hosts that may be asked, as `HOST` or `HOST:PORT`, `[ADDRESS]` for IPv6. Redirects must lead to
            these, too.
        seconds: Longest time, with all redirects.

    Raises:
        RequestError: The host is not one of these, its address is not public, or it answers with too much.
        UnavailableError: It does not answer with the content.
    """
    end = time.monotonic() + seconds
    for _ in range(_MOST_HOPS):
        url = _allowed(address, hosts)
        with _connected(url, end) as connection:
            target = url._replace(scheme="", netloc="", fragment="").geturl() or "/"
            connection.request("GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
            answer = connection.getresponse()
            moved = answer.headers.get("Location") if answer.status in _MOVED else None
            if moved is None:
                return _content(answer, most)
        try:
            address = urljoin(address, moved)
        except ValueError as error:
            raise RequestError(f"it leads to {shown(moved)}, which is no address: {one_line(error)}") from error
    raise RequestError(f"it leads to more than {_MOST_HOPS - 1} other addresses")


def _allowed(address: str, hosts: Collection[str]) -> SplitResult:
    """Return the parts of an address whose host may be asked."""
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise RequestError(f"{shown(address)} is no address: {one_line(error)}") from error
    if url.scheme not in _PORTS or not host:
        raise RequestError(f"{shown(address)} is no address of http or https")
    if not address.isascii() or any(one <= " " for one in address):
        raise RequestError(
            f"{shown(address)} is no address: spaces, and letters that are not ASCII, have codes such as %20"
        )
    own, usual = f"[{host}]" if ":" in host else host, _PORTS[url.scheme]
    with_port = f"{own}:{port or usual}"
    named = own if port in (None, usual) else with_port
    if named not in hosts and with_port not in hosts:
        raise RequestError(f"the host {shown(named)} is not among those from which images are fetched")
    if url.username is not None or url.password is not None:
        raise RequestError("an address of an image has no user or password")
    return url


def _public_address(host: str, port: int) -> tuple[str, int]:
    """Return an address of a host, all of whose addresses are public: the connection is made to this very one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"the host {shown(host)} is not known") from error
    addresses = [(str(one[4][0]), int(one[4][1])) for one in found]
    if not addresses or not all(_is_public(one) for one, _ in addresses):
        raise RequestError(f"the host {shown(host)} has an address that is not public")
    return addresses[0]


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inside = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _TRANSLATED:
            inside = ipaddress.IPv4Address(ip.packed[-4:])
        if not inside and ip not in _INTERNET:
            return False
        ip = inside or ip
    return ip.is_global and not ip.is_multicast


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was checked, whatever the name of its host leads to by now."""

    def __init__(self, url: SplitResult, address: tuple[str, int], seconds: float) -> None:
        assert url.hostname is not None
        super().__init__(url.hostname, url.port or _PORTS[url.scheme], timeout=seconds)
        self._address, self._secure = address, url.scheme == "https"
        self._opened: socket.socket | None = None  # also once a response has taken it over
        self.default_port = _PORTS[url.scheme]  # which the header Host leaves out

    def connect(self) -> None:
        self.sock = self._opened = socket.create_connection(self._address, self.timeout)
        if self._secure:
            context = ssl.create_default_context()
            # The handshake comes once the connection can be cut.
            secure = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock = self._opened = secure
            secure.do_handshake()

    def cut(self) -> None:
        """End the connection; another thread that waits for it goes on at once."""
        if self._opened is not None:
            with suppress(OSError):  # it has been closed meanwhile
                socket.socket.shutdown(self._opened, socket.SHUT_RDWR)  # TLS's own is not for another thread


@contextmanager
def _connected(url: SplitResult, end: float) -> Iterator[_Connection]:
    """Yield a connection that is cut at the time `end`: a timeout alone starts again with each byte that comes."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise UnavailableError("its host takes too long")
    port = url.port or _PORTS[url.scheme]
    connection = _Connection(url, _public_address(str(url.hostname), port), seconds)
    late = threading.Event()

    def cut() -> None:
        late.set()
        connection.cut()

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield connection
        if late.is_set():  # what was cut may look like an end
            raise TimeoutError(f"{url.hostname} did not end in time")
    except RequestError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:  # a host of names that are too long is a value
        why = "takes too long" if late.is_set() or isinstance(error, TimeoutError) else "cannot be asked"
        raise UnavailableError(f"its host {why}: {one_line(error, 200)}") from error
    finally:
        timer.cancel()
        connection.close()


def _content(answer: http.client.HTTPResponse, most: int) -> bytes:
    if answer.status != http.client.OK:
        raise UnavailableError(f"its host answers with status {answer.status}")
    if answer.length is not None and answer.length > most:
        raise RequestError(f"it has more than {most:,} bytes, the limit")
    content = bytearray()
    while piece := answer.read1(_PIECE):
        content += piece
        if len(content) > most:
            raise RequestError(f"it has more than {most:,} bytes, the limit")
    if answer.length:  # what was announced did not come
        raise UnavailableError("its host ended before all of it had come")
    return bytes(content)
