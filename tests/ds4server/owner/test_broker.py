"""The broker's socket, with clients that do not behave."""

import os
import socket
import stat
import threading

import pytest

from ds4server.owner import broker
from ds4server.owner.manifest import OwnerError


@pytest.fixture
def running(tmp_path):
    """(socket path, the bytes behind allocation 7)."""
    path = tmp_path / "s"
    (tmp_path / "data").write_bytes(b"hello")
    descriptor = os.open(tmp_path / "data", os.O_RDONLY)
    wake, stop = os.pipe()
    with broker.listen(path) as listener:
        thread = threading.Thread(target=broker.serve, args=(listener, {7: (descriptor, 5)}, [wake]))
        thread.start()
        yield path
        os.close(stop)
        thread.join(30)
    os.close(wake)
    os.close(descriptor)
    assert not thread.is_alive()


def asked(path, request):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        connection.sendall(request)
        data, descriptors, _, _ = socket.recv_fds(connection, 100, 4)
        rest = connection.recv(100)
    for descriptor in descriptors:
        os.close(descriptor)
    assert rest == b""  # one request per connection
    return data, len(descriptors)


def test_answers_are_the_documented_ones(running):
    assert asked(running, b"GET 7\n") == (b"OK 7 5\n", 1)
    for request in (b"GET 8\n", b"GET -7\n", b"GET 7 \n", b"PUT 7\n", b"GET\n", b"\n", b"GET 7\nGET 7\n", b"\xff" * 64,
                    b"GET " + b"9" * 50 + b"\n"):  # fmt: skip
        assert asked(running, request) == (b"ERR invalid allocation\n", 0), request


def test_a_descriptor_arrives(running):
    descriptor = broker.request(running, 7, 5)
    assert os.pread(descriptor, 10, 0) == b"hello" and not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_only_the_user_may_connect(running):
    assert stat.S_IMODE(running.stat().st_mode) == 0o600


def test_silent_and_leaving_clients_harm_nobody(running):
    silent = []
    for i in range(broker.PENDING + 20):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(running))
        if i % 3 == 0:
            connection.sendall(b"GE")
        silent.append(connection)
        if i % 16 == 15:
            assert asked(running, b"GET 7\n") == (b"OK 7 5\n", 1)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(str(running))
            gone.sendall(b"GET 7\n")
    silent[-1].sendall(b"GET 7\n")
    assert silent[-1].recv(100) == b"OK 7 5\n"
    for connection in silent:
        connection.close()
    assert asked(running, b"GET 7\n") == (b"OK 7 5\n", 1)


def test_a_request_may_come_in_pieces(running):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(running))
        for byte in b"GET 7\n":
            connection.sendall(bytes([byte]))
        assert connection.recv(100) == b"OK 7 5\n"


def test_waits_for_the_system_without_polling(tmp_path, monkeypatch):
    """Every wait is without a time limit, and there is one for each thing that arrives: connection, request, end."""
    waits = []

    class Watched(broker.selectors.DefaultSelector):
        def select(self, timeout=None):
            waits.append(timeout)
            return super().select(timeout)

    monkeypatch.setattr(broker.selectors, "DefaultSelector", Watched)
    wake, stop = os.pipe()
    with broker.listen(tmp_path / "s") as listener:
        thread = threading.Thread(target=broker.serve, args=(listener, {}, [wake]))
        thread.start()
        for _ in range(3):
            assert asked(tmp_path / "s", b"GET 1\n") == (b"ERR invalid allocation\n", 0)
        os.close(stop)
        thread.join(60)
    os.close(wake)
    assert set(waits) == {None} and len(waits) <= 2 * 3 + 1


def test_a_living_owner_keeps_its_socket(running):
    with pytest.raises(OwnerError, match="another owner listens there"):
        broker.listen(running)


def test_a_dead_owners_socket_is_taken_over(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    broker.listen(path).close()


def test_other_files_are_left_alone(tmp_path):
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(OwnerError, match="no socket lies there"):
        broker.listen(path)
    assert path.read_text() == "mine"


def test_path_length(tmp_path):
    broker.check_path("x" * 107)
    with pytest.raises(OwnerError, match="has a path of 108 bytes; Unix limits it to 107"):
        broker.listen("é" * 54)
