"""One directory behind several FUSE mounts, each with a page cache of its own, like a server's directory on NFS clients.

With FUSE's write-back cache, the kernel reads a page before it changes a part of the page, writes back full pages, and drops
cached pages when a file is opened. One process serves all mounts. Source: Linux `include/uapi/linux/fuse.h`, protocol 7.31.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import selectors
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MAX_WRITE_BYTES = 128 * 1024
WRITEBACK_CACHE, BIG_WRITES = 1 << 16, 1 << 5
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 4096, 16384, 1 << 18, 2
NO_REPLY = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
EMPTY_REPLY = (20, 25, 29, 30)  # FSYNC, FLUSH, RELEASEDIR, FSYNCDIR

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    converted = [str(a).encode() if isinstance(a, (str, Path)) else a for a in arguments]
    if getattr(libc, name)(*converted):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(arguments))


def is_refused() -> bool:
    """Return whether this process may not mount file systems."""
    return os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK)


@contextlib.contextmanager
def fuse_nodes(directory: Path, num_nodes: int) -> Iterator[tuple[Path, list[Path]]]:
    """Yield a directory and its mounts."""
    server = directory / "server"
    server.mkdir()
    mounts = [directory / f"node-{number}" for number in range(num_nodes)]
    for mount in mounts:
        mount.mkdir()
    process = subprocess.Popen([sys.executable, __file__, str(server), *map(str, mounts)])
    try:
        deadline = time.monotonic() + 30
        while not all(map(os.path.ismount, mounts)):
            assert process.poll() is None, "the mount was refused"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield server, mounts
    finally:
        for mount in mounts:
            with contextlib.suppress(OSError):
                call("umount2", mount, MNT_DETACH)
        process.kill()
        process.wait()


def see_as(mount: Path, common: Path) -> None:
    """Bind a mount to another path, for this process only."""
    call("unshare", CLONE_NEWNS)
    call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    call("mount", mount, common, None, MS_BIND, None)


class Server:
    """Answers the kernel's requests. A file keeps its number until it is deleted; numbers are not reused."""

    def __init__(self, directory: Path) -> None:
        self._paths = {1: str(directory)}
        self._numbers = {str(directory): 1}
        self._next = itertools.count(2)

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        """Return the reply to a request.

        Raises:
            OSError: the error to send as the reply.
        """
        if opcode in EMPTY_REPLY:
            return b""
        method = METHODS.get(opcode)
        if method is None:
            raise OSError(errno.ENOSYS, "")
        reply: bytes = method(self, self._paths.get(node, ""), body)
        return reply

    def _names(self, path: str, names: bytes) -> list[str]:
        return [f"{path}/{name.decode()}" for name in names.split(b"\0")[:-1]]

    def _init(self, path: str, body: bytes) -> bytes:
        flags = WRITEBACK_CACHE | BIG_WRITES
        return struct.pack("<4I2H2I2H8I", 7, 31, 2**17, flags, 16, 12, MAX_WRITE_BYTES, 1, 32, *[0] * 9)

    def _attributes(self, path: str) -> bytes:
        s = os.lstat(path)
        seconds = [int(s.st_atime), int(s.st_mtime), int(s.st_ctime)]
        owner = [s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0]
        return struct.pack("<6Q10I", self._numbers[path], s.st_size, s.st_blocks, *seconds, 0, 0, 0, *owner)

    def _entry(self, path: str) -> bytes:
        os.lstat(path)
        number = self._numbers.setdefault(path, next(self._next))
        self._paths[number] = path
        return struct.pack("<4Q2I", number, 0, 0, 0, 0, 0) + self._attributes(path)

    def _lookup(self, path: str, body: bytes) -> bytes:
        return self._entry(self._names(path, body)[0])

    def _getattr(self, path: str, body: bytes) -> bytes:
        return bytes(16) + self._attributes(path)

    def _setattr(self, path: str, body: bytes) -> bytes:
        if body[0] & 8:
            os.truncate(path, struct.unpack_from("<Q", body, 16)[0])
        return self._getattr(path, body)

    def _mkdir(self, path: str, body: bytes) -> bytes:
        [name] = self._names(path, body[8:])
        os.mkdir(name)
        return self._entry(name)

    def _remove(self, path: str, body: bytes) -> bytes:
        [name] = self._names(path, body)
        os.rmdir(name) if stat.S_ISDIR(os.lstat(name).st_mode) else os.unlink(name)
        self._numbers.pop(name, None)
        return b""

    def _rename(self, path: str, body: bytes, names_at: int = 8) -> bytes:
        old, new = body[names_at:].split(b"\0")[:2]
        source = f"{path}/{old.decode()}"
        target = f"{self._paths[struct.unpack_from('<Q', body)[0]]}/{new.decode()}"
        os.rename(source, target)
        moved = [known for known in self._numbers if known == source or known.startswith(f"{source}/")]
        for known in moved:
            number = self._numbers.pop(known)
            self._paths[number] = target + known[len(source) :]
            self._numbers[self._paths[number]] = number
        return b""

    def _rename2(self, path: str, body: bytes) -> bytes:
        return self._rename(path, body, 16)

    def _open(self, path: str, body: bytes) -> bytes:
        return struct.pack("<QII", os.open(path, os.O_RDWR), 0, 0)  # the kernel also reads files opened for writing

    def _opendir(self, path: str, body: bytes) -> bytes:
        return bytes(16)

    def _create(self, path: str, body: bytes) -> bytes:
        [name] = self._names(path, body[16:])
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        return self._entry(name) + struct.pack("<QII", descriptor, 0, 0)

    def _read(self, path: str, body: bytes) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(descriptor, size, offset)

    def _write(self, path: str, body: bytes) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(descriptor, body[40 : 40 + size], offset), 0)

    def _statfs(self, path: str, body: bytes) -> bytes:
        return struct.pack("<5Q10I", 10**6, 10**6, 10**6, 10**6, 10**6, 4096, 255, 4096, *[0] * 7)

    def _release(self, path: str, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _readdir(self, path: str, body: bytes) -> bytes:
        _, offset, _ = struct.unpack_from("<QQI", body)
        entries = b""
        for number, name in enumerate(sorted(os.listdir(path))[offset:], offset + 1):
            encoded = name.encode()
            kind = stat.S_IFMT(os.lstat(f"{path}/{name}").st_mode) >> 12
            entry = struct.pack("<QQII", number, number, len(encoded), kind) + encoded
            entries += entry + bytes(-len(entry) % 8)
        return entries  # the directories of these tests fit into one reply


METHODS = {
    1: Server._lookup,
    3: Server._getattr,
    4: Server._setattr,
    9: Server._mkdir,
    10: Server._remove,
    11: Server._remove,
    12: Server._rename,
    14: Server._open,
    15: Server._read,
    16: Server._write,
    17: Server._statfs,
    18: Server._release,
    26: Server._init,
    27: Server._opendir,
    28: Server._readdir,
    35: Server._create,
    45: Server._rename2,
}


def serve(directory: Path, mounts: list[Path]) -> None:
    """Mount a directory several times and answer until this process is killed."""
    server, ready = Server(directory), selectors.DefaultSelector()
    for number, mount in enumerate(mounts):
        device = os.open("/dev/fuse", os.O_RDWR)
        call("mount", f"node-{number}", mount, "fuse", 0, f"fd={device},rootmode=40000,user_id=0,group_id=0")
        ready.register(device, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            answer(server, key.fd)


def answer(server: Server, device: int) -> None:
    """Answer one request of a mount."""
    try:
        request = os.read(device, MAX_WRITE_BYTES + 4096)
    except OSError as error:
        if error.errno == errno.ENODEV:  # unmounted
            sys.exit()
        raise
    _, opcode, unique, number = struct.unpack_from("<IIQQ", request)
    if opcode in NO_REPLY:
        return
    try:
        reply, status = server.answer(opcode, number, request[40:]), 0
    except OSError as error:
        reply, status = b"", -(error.errno or errno.EIO)
    with contextlib.suppress(FileNotFoundError):  # the request was interrupted
        os.write(device, struct.pack("<IiQ", 16 + len(reply), status, unique) + reply)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), [Path(mount) for mount in sys.argv[2:]])
