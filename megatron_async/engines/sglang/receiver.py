"""Adds an endpoint to SGLang's server that builds the complete weights of a published version on
the server's machine. A version is published as a directory that may have only its differences from
the previous version.

    POST /receive_weights {"directory", "version", "full"}
        200 {"path", "bytes"}   the complete version is in the directory `path`, not loaded yet
        409                     the differences cannot be used: call again with "full": true
        400                     the complete version cannot be built, or a field is missing

Like all endpoints, it requires the server's API key. The weight transport `delta` calls it and then
lets SGLang load the weights from `path`.
"""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request

from megatron_async.errors import ComponentFailure
from megatron_async.weight_sync.receiver import FullVersionNeeded, WeightReceiver, make_root

PATH = "/receive_weights"


def answer(receiver: WeightReceiver, body: dict[str, Any]) -> tuple[HTTPStatus, dict[str, Any]]:
    """Let `receiver` build the complete weights that `body` names; return the HTTP status and the
    reply of the endpoint `/receive_weights`."""
    try:
        received = receiver.receive(
            Path(str(body["directory"])), str(body["version"]), full=bool(body["full"])
        )
    except KeyError as missing:
        return HTTPStatus.BAD_REQUEST, {"message": f"{PATH} was called without {missing}"}
    except FullVersionNeeded as error:
        return HTTPStatus.CONFLICT, {"message": str(error)}
    except ComponentFailure as error:
        return HTTPStatus.BAD_REQUEST, {"message": str(error)}
    return HTTPStatus.OK, {"path": str(received.path), "bytes": received.bytes}


@contextmanager
def receiver_of(app: FastAPI) -> Iterator[None]:
    """Add the endpoint to `app`; remove received weights at the end of this block."""
    receiver: WeightReceiver | None = None
    root: Path | None = None
    one_at_a_time = asyncio.Lock()

    async def receive(request: Request) -> JSONResponse:
        nonlocal receiver, root
        body = await request.json()
        async with one_at_a_time:
            # Create the directory at the first call, because most engines are never called.
            if receiver is None:
                root = make_root()
                receiver = WeightReceiver(root)
            status, content = await asyncio.to_thread(answer, receiver, body)
        return JSONResponse(content, status_code=status)

    app.add_api_route(PATH, receive, methods=["POST"])
    try:
        yield
    finally:
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
