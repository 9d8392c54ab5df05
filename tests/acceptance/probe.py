"""An ASGI application behind the API's own server settings, which shows what the server says to `receive`."""

import asyncio
import json
from pathlib import Path

from api.disconnect import Receive, Scope, Send


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for answer in ("lifespan.startup.complete", "lifespan.shutdown.complete"):
            await receive()
            await send({"type": answer})
        return
    body = (await receive())["body"]
    said = await (_left(Path(json.loads(body)), receive) if scope["path"] == "/left" else _cancelled(receive))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said.encode()})


async def _left(note: Path, receive: Receive) -> str:
    """Writes down that it waits, and that the client has left."""
    note.write_text("waits")
    while (await receive())["type"] != "http.disconnect":
        pass
    note.write_text("left")
    return ""


async def _cancelled(receive: Receive) -> str:
    """What a wait for the client's leaving comes to that is given up."""
    waiting = asyncio.create_task(receive())
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait([waiting])
    return "cancelled" if waiting.cancelled() else str(waiting.result()["type"])
