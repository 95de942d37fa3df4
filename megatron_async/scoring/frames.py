"""Defines the format of the messages between a scorer worker and its scorer process.

A worker (`workers.ScorerWorker`) starts a scorer process, which runs the reward functions, and
sends requests for scores to the process.

Invariants
- A request is one line of JSON, on a pipe that only the worker writes to.
- A reply is one JSON packet on a `SOCK_SEQPACKET` socket. The kernel keeps packets apart. So any
  other data that is written to the socket is a separate packet and never shifts or breaks a reply.
- Every message has an `id`. A reply has the `id` of its request. So if a reply is sent twice, the
  second one is not mistaken for the reply to another request.
"""

import json
from typing import Any, Final

MAX_REPLY_BYTES: Final = 1 << 16
"""Maximum size of a reply packet."""
START_ID: Final = "start"
"""The `id` of the scorer's first packet, which reports that it is ready or refuses its settings."""
END_ID: Final = "end"
"""The `id` of the only packet of the keeper, the scorer's parent process (see `process_main`).

It reports that the scorer has ended and that every process that it started was killed."""
BLOCKING: Final = "blocking"
"""Kind of a scorer process that scores one response after the other."""
ASYNC: Final = "async"
"""Kind of a scorer process that runs many `async def` rewards concurrently."""


def request_frame(content: dict[str, Any]) -> bytes:
    """Encode a request to a scorer process as one line of JSON."""
    return json.dumps(content).encode() + b"\n"


def parse_request(line: bytes) -> dict[str, Any] | None:
    """Decode a line of JSON as a request to a scorer process.

    Returns:
        The request; None if the line does not end with a newline. This happens when the worker has
        closed the pipe, so that no request follows.
    """
    content: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return content


def reply_packet(name: str, content: dict[str, Any]) -> bytes:
    """Encode the reply to the request with the `id` `name` as one JSON packet.

    Raises:
        ValueError: If the packet is larger than `MAX_REPLY_BYTES` or contains NaN or infinity.
    """
    body = json.dumps({"id": name, **content}, allow_nan=False).encode()
    if len(body) > MAX_REPLY_BYTES:
        raise ValueError(
            f"the score and its components take {len(body)} bytes of JSON; a reply holds at most "
            f"{MAX_REPLY_BYTES}. Return fewer components."
        )
    return body


def parse_reply(packet: bytes) -> dict[str, Any] | None:
    """Decode a packet as a scorer's reply; return None if it is not an object with an `id`."""
    try:
        content = json.loads(packet)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("id"), str) else None
