"""A directory that several processes write whole files into: nobody ever sees a part of one.

Theory of operation. A file is written beside its place, under a name that no reader looks at, flushed to the device, renamed,
and the directory flushed. While it is written it is locked by its writer, and the kernel drops the lock when the writer dies,
however it dies: a temporary file that nobody locks is a left-over. ``.lock`` is held where a file is made, where left-overs
are looked for, and where the files of all processes are counted and one more gets its place.

Every file is private to the user: 0600. Knows nothing about what the files hold.
"""

import errno
import fcntl
import itertools
import os
import stat
import time
from contextlib import contextmanager, suppress

LOCK_SECONDS = 5.0
BLOCK = 1 << 24

_numbers = itertools.count()


def check(directory):
    """OSError where files cannot be made in ``directory``."""
    path, fd = temporary(directory, ".payload")
    path.unlink(missing_ok=True)  # who does not hold ``exclusive`` may have lost it as a left-over
    os.close(fd)


@contextmanager
def exclusive(directory):
    """Alone in the directory. OSError where another process does not let go of it in time."""
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not try_lock(fd):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the directory's lock")
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def try_lock(fd):
    """Lock the file for this descriptor, as long as it is open. Whether nobody else had it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def temporary(directory, prefix):
    """(path, descriptor) of a new file, locked until the descriptor is closed. For the holder of ``exclusive``. OSError."""
    path = directory / f"{prefix}.{os.getpid()}.{next(_numbers)}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try_lock(fd)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return path, fd


def remove_left_overs(directory, is_temporary):
    """Delete the temporary files whose writers are gone. For the holder of ``exclusive``. OSError."""
    for name in filter(is_temporary, os.listdir(directory)):
        with suppress(OSError), opened(directory / name) as fd:
            if try_lock(fd):
                os.unlink(directory / name)


def publish(path, final):
    """Give the temporary file at ``path``, flushed already, its final name, for good. OSError."""
    os.rename(path, final)
    directory = os.open(final.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def opened(path, write=False):
    """A descriptor of a regular file; with ``write`` writable where that is possible. OSError."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | (os.O_RDWR if write else os.O_RDONLY))
    except OSError as error:
        if not write or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        fd = os.open(path, flags | os.O_RDONLY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield fd
    finally:
        os.close(fd)


def version(status):
    """What changes when a file does, from its ``stat``."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def read(fd, at, size):
    """``size`` bytes, as a bytearray; EOFError where the file ends before. The caller knows that the file had them."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = os.preadv(fd, [view[done : done + BLOCK]], at + done)
        if not got:
            raise EOFError(f"file ends {size - done} bytes early")
        done += got
    return data


def write(fd, part):
    """All of a buffer of bytes. OSError."""
    view = memoryview(part)
    while len(view):
        view = view[os.write(fd, view[:BLOCK]) :]
