"""A stand-in for a server of OpenEnv, for where the package is not: it repeats what the real one was recorded to say.

It is not OpenEnv. `openenv_recorded.json` holds the messages that the server GUESS of `test_environments.py` exchanged under
openenv 0.10.0; where the package is, a test compares them with what it says now. Taking sessions, hanging at the guess 98 and
dying at 99 is done here as that server does it.
"""

import json
import os
import sys
import threading
from http import HTTPStatus
from pathlib import Path
from typing import Any

from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

RECORDED = json.loads(Path(__file__).with_name("openenv_recorded.json").read_text())
MOST = RECORDED["full"]["data"]["max_sessions"]
HANGS, DIES = 98, 99
playing = threading.Semaphore(MOST)


def answer(request: Any, seed: int | None) -> Any:
    (session,) = (one for one in RECORDED["sessions"] if one["seed"] == seed)
    return next(said for asked, said in session["exchanges"] if asked == request)


def play(connection: ServerConnection) -> None:
    if not playing.acquire(blocking=False):
        connection.send(json.dumps(RECORDED["full"]))
        return
    try:
        seed = None
        for text in connection:
            request = json.loads(text)
            given = request.get("data", {})
            if request["type"] == "close":
                return
            if request["type"] == "reset":
                seed = given.get("seed")
            if given.get("number") == HANGS:
                threading.Event().wait()
            if given.get("number") == DIES:
                os._exit(1)
            connection.send(json.dumps(answer(request, seed)))
    finally:
        playing.release()


def schema(connection: ServerConnection, request: Request) -> Response | None:
    if request.path == "/schema":
        return connection.respond(HTTPStatus.OK, json.dumps({"action": RECORDED["action"]}))
    return None


if __name__ == "__main__":
    server = serve(play, "127.0.0.1", 0, process_request=schema)
    sys.stdout.write(f"{server.socket.getsockname()[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
