"""A network between two programs that can be made worse: bytes come slowly, wrong, in part, or not at all."""

import socket
import threading
import time
from contextlib import contextmanager, suppress

FAULTS = ("slow", "cut", "cut in the middle", "half-open", "wrong bytes")
ENOUGH = 2000  # bytes of an answer after which it is cut or changed: what comes before are headers and small rows


class Proxy:
    """Passes connections on to a port; ``fault`` says how the answers come."""

    def __init__(self, port):
        self.fault, self._target, self._open = None, port, set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def become(self, fault):
        """From now on, on new connections and on those that are open."""
        self.fault = fault
        if fault == "cut":
            for each in list(self._open):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.become("cut")
        self._socket.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                if self.fault == "cut":
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open |= {near, far}
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source, target, is_answer):
        with suppress(OSError):
            while data := source.recv(65_536):
                fault = self.fault if is_answer else None
                if fault == "half-open":
                    continue
                if fault == "slow":
                    for start in range(0, len(data), 512):
                        time.sleep(0.05)
                        target.sendall(data[start : start + 512])
                    continue
                if fault == "wrong bytes" and len(data) > ENOUGH:
                    data = data[:-500] + b"?" * 500
                if fault == "cut in the middle" and len(data) > ENOUGH:
                    target.sendall(data[:ENOUGH])
                    break
                target.sendall(data)
        for each in (source, target):
            self._open.discard(each)
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def proxy_of(port):
    made = Proxy(port)
    try:
        yield made
    finally:
        made.close()
