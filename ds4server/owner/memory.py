"""Memory that processes share by descriptor, and that nobody can change once it is filled.

On Linux a sealed ``memfd``; on systems without, a shared-memory object that has lost its name, handed out read-only: what
keeps it unchanged there is that no writable descriptor is left.
"""

import fcntl
import mmap
import os
import secrets

from .manifest import OwnerError

SEALABLE = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def create(name, nbytes, fill):
    """A read-only descriptor of ``nbytes`` new bytes. ``fill(view)`` writes them; then they are sealed.

    OwnerError where the system has not so much memory. ``name`` is what process lists show.
    """
    try:
        writer, reader = _sealable(name) if SEALABLE else _unlinked()
    except OSError as error:
        raise OwnerError(f"no shared memory can be made for {name}: {error.strerror or error}") from None
    try:
        _reserve(writer, nbytes, name)
        pages = mmap.mmap(writer, nbytes)
        with memoryview(pages) as view:
            fill(view)
        pages.close()  # a mapped writable file cannot be sealed
        if SEALABLE:
            fcntl.fcntl(writer, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | sum(_seals().values()))
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return reader


def seals_missing(descriptor):
    """Which of "write", "grow" and "shrink" a descriptor is not sealed against. All where it cannot be sealed at all."""
    try:
        have = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        have = 0
    return [name for name, seal in _seals().items() if not have & seal]


def _seals():
    return {"write": fcntl.F_SEAL_WRITE, "grow": fcntl.F_SEAL_GROW, "shrink": fcntl.F_SEAL_SHRINK}


def _reserve(writer, nbytes, name):
    """Take the memory now: a page that cannot be had would end the process when it is first written."""
    try:
        os.ftruncate(writer, nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(writer, 0, nbytes)
    except OSError as error:
        raise OwnerError(f"{name}: {nbytes} bytes of memory cannot be had ({error.strerror or error})") from None


def _sealable(name):
    """(writable, read-only) descriptors of one memory file.

    Workers get the read-only one: before Linux 6.7 a writable descriptor of a sealed file cannot be mapped as shared.
    """
    writer = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        return writer, os.open(f"/proc/self/fd/{writer}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(writer)
        raise


def _unlinked():
    """(writable, read-only) descriptors of a shared-memory object without a name."""
    from _posixshmem import shm_open, shm_unlink  # what multiprocessing.shared_memory stands on; that gives no descriptors

    name = f"/ds4-{secrets.token_hex(8)}"
    writer = shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        return writer, shm_open(name, os.O_RDONLY, mode=0o600)
    except OSError:
        os.close(writer)
        raise
    finally:
        shm_unlink(name)
