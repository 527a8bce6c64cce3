"""A real server on a real socket."""

import socket
import threading
import time
from contextlib import contextmanager

import uvicorn

from kvrag_server import create_app


@contextmanager
def served(engine, config=None, *, send_buffer=None, port=0):
    """Serve an engine on a port, by default a free one; give the application and its address.

    ``send_buffer``: bytes that a connection's socket holds.
    """
    app = create_app(engine, config)
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        listening = server.servers[0].sockets[0]
        if send_buffer:
            listening.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer
            )  # connections have their listener's
        yield app, f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def until(condition, seconds=20):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
