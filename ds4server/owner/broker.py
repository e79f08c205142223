"""The broker: hands out descriptors of the owner's allocations over a Unix stream socket.

One request per connection: ``GET <id>\\n`` is answered by ``OK <id> <alloc bytes>\\n`` with the descriptor as ancillary
data (SCM_RIGHTS), or by ``ERR invalid allocation\\n``. Nobody needs to be trusted to send a whole request soon: connections
are looked at when bytes arrive, and of more than PENDING silent ones the oldest goes. Knows nothing about weights.
"""

import contextlib
import os
import selectors
import socket
import stat
from pathlib import Path

from .manifest import OwnerError

BACKLOG = 16
PENDING = 64
LONGEST = 64  # bytes of a request or an answer
PATIENCE = 30.0  # seconds that a worker waits for an answer
SOCKET_PATH = 107
REFUSAL = b"ERR invalid allocation\n"


def check_path(path):
    """OwnerError where a Unix socket cannot have this path."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH:
        raise OwnerError(f"broker socket {path} has a path of {size} bytes; Unix limits it to {SOCKET_PATH}: use a shorter one")


def listen(path):
    """A listening socket that only this user may use. OwnerError where the place is taken or cannot be had."""
    check_path(path)
    _clear(Path(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OwnerError(f"broker socket {path}: cannot listen ({error.strerror or error})") from None
    finally:
        os.umask(before)
    return listener


def _clear(path):
    """Unlink the socket of an owner that is gone. OwnerError where one still listens, or where no socket lies."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OwnerError(f"broker socket {path}: something that is no socket lies there")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(os.fspath(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return
    except OSError as error:
        raise OwnerError(f"broker socket {path}: cannot be looked at ({error.strerror or error})") from None
    raise OwnerError(f"broker socket {path}: another owner listens there")


def serve(listener, allocations, wake):
    """Answer requests until one of the descriptors ``wake`` can be read.

    allocations: id → (descriptor, bytes). Sleeps in the system until something arrives.
    """
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as left:
        pending = {}  # connection → the request so far, oldest first
        left.callback(lambda: [connection.close() for connection in pending])
        selector.register(listener, selectors.EVENT_READ)
        for descriptor in wake:
            selector.register(descriptor, selectors.EVENT_READ, "wake")
        while True:
            ready = [key for key, _ in selector.select()]
            if any(key.data == "wake" for key in ready):
                return
            for key in ready:
                if key.fileobj is listener:
                    _accept(listener, selector, pending)
                elif key.fileobj in pending and _progress(key.fileobj, pending, allocations):
                    _drop(key.fileobj, selector, pending)


def _accept(listener, selector, pending):
    try:
        connection, _ = listener.accept()
    except OSError:  # the other end is gone already, or no descriptor is free: the next one is asked for when it comes
        return
    connection.setblocking(False)
    if len(pending) >= PENDING:
        _drop(next(iter(pending)), selector, pending)
    pending[connection] = b""
    selector.register(connection, selectors.EVENT_READ)


def _drop(connection, selector, pending):
    selector.unregister(connection)
    del pending[connection]
    connection.close()


def _progress(connection, pending, allocations):
    """Take what has arrived, answer a complete request; whether the connection is done with."""
    try:
        data = connection.recv(LONGEST)
        pending[connection] += data
        request = pending[connection]
        if data and b"\n" not in request and len(request) < LONGEST:
            return False
        if data:
            _answer(connection, request, allocations)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the worker is gone: nothing of the owner's hangs on it
    return True


def _answer(connection, request, allocations):
    id = _requested(request)
    if id not in allocations:
        connection.sendall(REFUSAL)
        return
    descriptor, nbytes = allocations[id]
    socket.send_fds(connection, [f"OK {id} {nbytes}\n".encode()], [descriptor])


def _requested(request):
    """The id of ``GET <id>\\n``, or None."""
    verb, _, id = request.partition(b" ")
    digits = id.removesuffix(b"\n")
    return int(digits) if verb == b"GET" and id.endswith(b"\n") and digits.isdigit() and len(digits) < 20 else None


def request(path, id, nbytes):
    """Ask the broker at ``path`` for allocation ``id`` of ``nbytes``; returns its descriptor.

    OwnerError where nobody answers, or anything but that id and that size.
    """
    check_path(path)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(os.fspath(path))
            connection.sendall(f"GET {id}\n".encode())
            answer, descriptors = _receive(connection)
    except OSError as error:
        raise OwnerError(f"broker {path}: does not answer for range {id} ({error.strerror or error})") from None
    expected = f"OK {id} {nbytes}\n".encode()
    if answer == expected and len(descriptors) == 1:
        return descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    found = f"answers {answer!r}" + ("" if len(descriptors) == 1 else f" with {len(descriptors)} descriptors")
    raise OwnerError(f"broker {path}: {found} for range {id}; {expected!r} with one descriptor is expected")


def _receive(connection):
    """(answer up to its line's end or the connection's, every descriptor that came with it)."""
    answer, descriptors = b"", []
    try:
        while b"\n" not in answer and len(answer) < LONGEST:
            data, more, _, _ = socket.recv_fds(connection, LONGEST, 4)
            descriptors += more
            answer += data
            if not data:
                break
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return answer, descriptors
