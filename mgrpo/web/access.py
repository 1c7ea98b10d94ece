"""Who may ask a part of a run: whoever is on this machine, or whoever has the token."""

from __future__ import annotations

import ipaddress
import os

from mgrpo.errors import UserError

TOKEN_VARIABLE = "MGRPO_TOKEN"
_SHORTEST_TOKEN = 16


def token() -> str | None:
    """What every request to a part must carry, from the environment. UserError for one that is no good."""
    found = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not found:
        return None
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise UserError(f"{TOKEN_VARIABLE} holds what no HTTP header can; export letters and digits only")
    if len(found) < _SHORTEST_TOKEN:
        raise UserError(
            f"{TOKEN_VARIABLE} is shorter than {_SHORTEST_TOKEN} characters; make one with: openssl rand -hex 32"
        )
    return found


def check_binding(host: str, token: str | None) -> None:
    """UserError where ``host`` can be reached from other machines and there is no token to keep them out."""
    if token is None and not is_loopback(host):
        raise UserError(
            f"{host or 'every address'} can be reached from other machines: export {TOKEN_VARIABLE}"
            " (the same on all of them), or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    name = host.strip().removeprefix("[").removesuffix("]").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
