"""The names by which clients may address a server, in the Host header of their requests.

A page of another site can let its own name point to 127.0.0.1 (DNS rebinding), and a browser then lets it read answers
of a server on this computer. Its requests name that site as their host, so they are refused. A host that is an IP
address is always allowed, since no site can make an address point elsewhere.
"""

import ipaddress
import re
from collections.abc import Collection

from radq.errors import OptionError

ANY = "*"
LABEL = r"[a-z0-9_](?:[a-z0-9_\-]*[a-z0-9_])?"
NAME = re.compile(rf"(?:\*\.)?{LABEL}(?:\.{LABEL})*")


def check_host(host: str) -> None:
    """Refuse a name that is no name of a computer, such as one with a port."""
    if host != ANY and not NAME.fullmatch(_normalise(host)) and not _is_address(_normalise(host)):
        raise OptionError(
            f"hosts must be names such as radq.example.com or *.example.com, got {host!r}.",
            'leave scheme, port and path out, or write "*" to allow any name.',
        )


class AllowedHosts:
    """The names of a server: localhost, the address that it listens at, and those that its operator lists.

    A server that listens at all addresses cannot know its names, so it allows any, unless its operator lists some.
    """

    def __init__(self, address: str, listed: Collection[str] = ()):
        bound = _normalise(address)
        names = {"localhost", bound, *map(_normalise, listed)}
        self._any = ANY in names or (not listed and _is_everywhere(bound))
        self._names = {name for name in names if not name.startswith("*.")}
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))

    def allow(self, header: str) -> bool:
        """Whether a request with this Host header is allowed."""
        name = _normalise(_without_port(header))
        return self._any or name in self._names or name.endswith(self._endings) or _is_address(name)


def _without_port(header: str) -> str:
    name, colon, port = header.strip().rpartition(":")
    return name if colon and port.isdigit() else header.strip()


def _normalise(name: str) -> str:
    return name.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_everywhere(address: str) -> bool:
    return not address or (_is_address(address) and ipaddress.ip_address(address).is_unspecified)
