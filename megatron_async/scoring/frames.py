"""The frames between a worker and its scorer process.

Invariants
- A request is a line of JSON, on a pipe that only the worker writes to.
- A reply is one JSON packet on a `SOCK_SEQPACKET` socket. The kernel keeps packets apart, so that
  what else is written to the socket is a packet of its own and never shifts or breaks a reply.
- Every frame has an `id`. A reply has the id of its request, so that a reply that comes twice is
  not taken for another one.
"""

import json
from typing import Any, Final

LARGEST_REPLY_BYTES: Final = 1 << 16
START_ID: Final = "start"
"""Of the scorer's first packet: it is ready, or refuses its settings."""
END_ID: Final = "end"
"""Of the keeper's only packet: the scorer has ended, and nothing that it started is left."""
BLOCKING: Final = "blocking"
WAITING: Final = "waiting"
"""The two kinds of scorer processes: one response at a time, or many that wait for others."""


def request_frame(content: dict[str, Any]) -> bytes:
    """A request as it travels."""
    return json.dumps(content).encode() + b"\n"


def parse_request(line: bytes) -> dict[str, Any] | None:
    """The request in a line; `None` for what is no whole line: there will be no more."""
    content: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return content


def reply_packet(name: str, content: dict[str, Any]) -> bytes:
    """A reply as it travels. Raises ValueError when it is too large or holds NaN or infinity."""
    body = json.dumps({"id": name, **content}, allow_nan=False).encode()
    if len(body) > LARGEST_REPLY_BYTES:
        raise ValueError(
            f"the score and its parts take {len(body)} bytes of JSON; at most "
            f"{LARGEST_REPLY_BYTES} fit in a reply"
        )
    return body


def parse_reply(packet: bytes) -> dict[str, Any] | None:
    """The content of a packet, `None` when it is no reply at all."""
    try:
        content = json.loads(packet)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("id"), str) else None
