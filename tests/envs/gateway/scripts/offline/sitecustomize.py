"""A Python that begins with this folder on its path reaches 127.0.0.1 alone, and says what it was refused."""

import sys

LOCAL = ("127.0.0.1", "localhost", None, "")


def refuse(event, arguments):
    """Every connection and every look-up of the module `socket` passes here."""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[-1]
        host = address[0] if isinstance(address, tuple) else None
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in LOCAL:
        print(f"refused: {host}", file=sys.stderr, flush=True)
        raise OSError(f"{host} is out of reach")


sys.addaudithook(refuse)
