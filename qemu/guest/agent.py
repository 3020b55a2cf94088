"""Guest agent: serves one session per virtio-serial port; programs, files, and the guest's devices and network.

Wire: the client sends b"EMU1 <nonce>\n" and skips everything until the same line comes back. Then frames both ways:
one byte of kind, four bytes of length (big-endian), the body. The first is the request, kind R, as JSON.
  client: i stdin, c end of stdin, s signal (JSON), w window size (JSON)
  agent:  o stdout, e stderr, b what was written to a stdin that is a socket, k still there, A the final answer (JSON), X a new agent knows nothing of this session
A client that goes away ends what its session runs.
"""

import contextlib
import errno
import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cxl
import net

HELLO = b"EMU1 "
CHUNK = 1 << 16
STDIN_LIMIT = 1 << 20
ALIVE_EVERY_S = 5.0


class Gone(Exception):
    """The client is gone."""


class Port:
    """One session on one port; reads and writes wait, but never for a client that is gone."""

    def __init__(self, fd, data):
        self.fd = fd
        self.unread = bytearray(data)

    def pull(self, timeout_s=None):
        """Take in what has come; False when nothing did in time."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        if not poller.poll(None if timeout_s is None else timeout_s * 1000):
            return False
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            raise Gone
        self.unread += data
        return True

    def greet(self):
        """Wait for a hello, whatever an earlier client left before it, and answer it."""
        while True:
            start = self.unread.find(HELLO)
            end = self.unread.find(b"\n", start) if start >= 0 else -1
            if end >= 0:
                hello = bytes(self.unread[start : end + 1])
                del self.unread[: end + 1]
                self.write(hello)
                return
            self.pull()

    def frame(self):
        """The next frame that is there whole, (kind, body); None when there is none yet."""
        if len(self.unread) < 5:
            return None
        kind, length = self.unread[:1], int.from_bytes(self.unread[1:5], "big")
        if kind not in (b"R", b"i", b"c", b"s", b"w") or length > 1 << 24:
            raise Gone  # another client's hello in the middle of this session
        if len(self.unread) < 5 + length:
            return None
        body = bytes(self.unread[5 : 5 + length])
        del self.unread[: 5 + length]
        return bytes(kind), body

    def next_frame(self):
        """Wait for the next frame."""
        while True:
            found = self.frame()
            if found is not None:
                return found
            self.pull()

    def write(self, data):
        """Write everything."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self.fd, select.POLLOUT)
                if any(event & (select.POLLHUP | select.POLLERR) for _, event in poller.poll()):
                    raise Gone from None
            except OSError as error:
                raise Gone from error

    def send(self, kind, body=b""):
        """Send one frame."""
        self.write(kind + len(body).to_bytes(4, "big") + body)

    def answer(self, value):
        """Send the final answer."""
        self.send(b"A", json.dumps(value).encode())


def ping(port, request):
    """Say who answers."""
    return {"pid": os.getpid(), "kernel": os.uname().release, "uptime_s": time.monotonic()}


def setup(port, request):
    """Make regions, devices and the network as asked; what is there already stays."""
    socket.sethostname(request["host"])
    answer = {"devices": cxl.setup(request["regions"])}
    if request.get("network"):
        answer["network"] = net.setup(**request["network"])
    return answer


def devices(port, request):
    """The devices as they are now."""
    return {"devices": cxl.report()}


def network(port, request):
    """The network as it was set up."""
    return {"network": net.report()}


def mode(port, request):
    """Change one region's mode."""
    return {"device": cxl.set_mode(request["serial"], request["mode"])}


def put(port, request):
    """Write a file from the frames that follow; it gets its name when it is complete."""
    path, draft = request["path"], request["path"] + ".emu-part"
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "is a directory", path)
    try:
        with open(draft, "wb") as file:
            while (frame := port.next_frame())[0] == b"i":
                file.write(frame[1])
        os.chmod(draft, request["mode"])
        os.rename(draft, path)
    except BaseException:
        if os.path.exists(draft):
            os.unlink(draft)
        raise
    return {}


def get(port, request):
    """Send a file."""
    with open(request["path"], "rb") as file:
        mode_bits = os.fstat(file.fileno()).st_mode & 0o777
        while data := file.read(CHUNK):
            port.send(b"o", data)
    return {"mode": mode_bits}


class Program:
    """A program and the ends of its streams that are ours."""

    def __init__(self, request):
        self.tty = request.get("tty")
        self.streams = {}  # our fd -> frame kind
        self.stdin = None
        ours, theirs = self._open_streams(request.get("socket"))
        env = {**request["env"], **cxl.environment(), **net.environment()}
        cwd = request.get("cwd") or "/"
        try:
            self.process = subprocess.Popen(
                request["argv"],
                stdin=theirs[0],
                stdout=theirs[1],
                stderr=theirs[2],
                env=env,
                cwd=cwd if os.path.isdir(cwd) else "/",
                start_new_session=True,
                preexec_fn=self._take_terminal if self.tty else None,
            )
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in set(theirs):
                os.close(fd)

    def _open_streams(self, as_socket):
        if self.tty:
            ours, theirs = pty.openpty()
            os.set_blocking(ours, False)
            self.streams, self.stdin = {ours: b"o"}, ours
            self.resize_fd(ours, self.tty)
            return {ours}, (theirs, theirs, theirs)
        err_ours, err = os.pipe()
        out_ours, out = os.pipe()
        self.streams = {out_ours: b"o", err_ours: b"e"}
        if as_socket:
            a, b = socket.socketpair()
            self.stdin, inp = a.detach(), b.detach()
            self.streams[self.stdin] = b"b"
        else:
            inp, self.stdin = os.pipe()
        os.set_blocking(self.stdin, False)
        return {*self.streams, self.stdin}, (inp, out, err)

    def _take_terminal(self):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, size):
        """Tell a terminal's program the window's size."""
        if self.tty and self.stdin is not None:
            self.resize_fd(self.stdin, size)

    def resize_fd(self, fd, size):
        """Set the size of a terminal."""
        packed = struct.pack("HHHH", size["rows"], size["columns"], 0, 0)
        fcntl.ioctl(fd, termios.TIOCSWINSZ, packed)

    def close_stdin(self):
        """The program reads the end of its input."""
        if self.stdin is None:
            return
        if self.tty:
            return
        if self.stdin in self.streams:
            sock = socket.socket(fileno=os.dup(self.stdin))
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            sock.close()
        else:
            os.close(self.stdin)
        self.stdin = None

    def signal(self, number):
        """Signal the program and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self):
        """Kill what still runs, close what is open."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        for fd in set(self.streams) | ({self.stdin} if self.stdin is not None else set()):
            os.close(fd)


class Exchange:
    """Moves a program's streams until it has ended or the client goes away."""

    def __init__(self, port, program, timeout_s):
        self.port, self.program = port, program
        self.pending = bytearray()  # stdin that the program has not taken yet
        self.closing = False
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.pidfd = os.pidfd_open(program.process.pid)

    def close(self):
        """Close what is its own."""
        os.close(self.pidfd)

    def run(self):
        """Return the program's status, negative for a signal; None when its time is over."""
        ended_at = None
        spoken_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now - spoken_at > ALIVE_EVERY_S:
                self.port.send(b"k")
                spoken_at = now
            if ended_at is None and self.program.process.poll() is not None:
                ended_at = now
            if ended_at is not None and (not self.program.streams or now - ended_at > 0.2):
                return self.program.process.returncode
            if self.deadline is not None and now > self.deadline and ended_at is None:
                return None
            self.turn(0.5 if ended_at is None else 0.05, watch_end=ended_at is None)

    def turn(self, wait_s, watch_end):
        """One round of whatever is ready."""
        while (frame := self.port.frame()) is not None:
            self.take(*frame)
        poller = select.poll()
        if len(self.pending) < STDIN_LIMIT:
            poller.register(self.port.fd, select.POLLIN)
        else:
            poller.register(self.port.fd, 0)
        masks = dict.fromkeys(self.program.streams, select.POLLIN)
        if self.pending and self.program.stdin is not None:
            masks[self.program.stdin] = masks.get(self.program.stdin, 0) | select.POLLOUT
        for fd, mask in masks.items():
            poller.register(fd, mask)
        if watch_end:
            poller.register(self.pidfd, select.POLLIN)
        for fd, event in poller.poll(wait_s * 1000):
            if fd == self.port.fd:
                if event & select.POLLIN:
                    self.port.pull(0)
                elif event & select.POLLHUP:
                    raise Gone
            elif fd in masks:
                self.move(fd, event)

    def move(self, fd, event):
        """Stdin to the program, or its output to the client."""
        if event & select.POLLOUT and self.pending and fd == self.program.stdin:
            self.feed()
        if fd in self.program.streams and event & (select.POLLIN | select.POLLHUP | select.POLLERR):
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                return
            except OSError:  # EIO: the terminal's last user is gone
                data = b""
            if data:
                self.port.send(self.program.streams[fd], data)
                return
            del self.program.streams[fd]
            if fd == self.program.stdin:
                self.program.stdin = None
            os.close(fd)
        elif (
            event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) and fd == self.program.stdin
        ):
            self.pending.clear()
            self.program.close_stdin()

    def take(self, kind, body):
        """One frame of the client's."""
        if kind == b"i":
            self.pending += body
        elif kind == b"c":
            self.closing = True
        elif kind == b"s":
            self.program.signal(json.loads(body)["number"])
        elif kind == b"w":
            self.program.resize(json.loads(body))
        if self.program.stdin is None:
            self.pending.clear()
        if self.closing and not self.pending:
            self.program.close_stdin()

    def feed(self):
        """Give the program as much stdin as it takes."""
        try:
            del self.pending[: os.write(self.program.stdin, self.pending)]
        except BlockingIOError:
            return
        except OSError:  # it does not read any more
            self.pending.clear()
            self.program.close_stdin()
            return
        if self.closing and not self.pending:
            self.program.close_stdin()


def run_program(port, request):
    """Run a program to its end."""
    program = Program(request)
    exchange = Exchange(port, program, request.get("timeout_s"))
    try:
        status = exchange.run()
    finally:
        exchange.close()
        program.end()
    return {"status": status, "timeout": status is None}


REQUESTS = {
    "ping": ping,
    "setup": setup,
    "devices": devices,
    "mode": mode,
    "network": network,
    "put": put,
    "get": get,
    "exec": run_program,
}


def serve(port):
    """One session after another, until the client is gone."""
    port.greet()
    kind, body = port.next_frame()
    if kind != b"R":
        raise Gone
    request = json.loads(body)
    try:
        answer = {"ok": True, **REQUESTS[request["do"]](port, request)}
    except Gone:
        raise
    except cxl.DeviceError as error:
        answer = {"ok": False, "kind": "device", "message": str(error), "remedy": error.remedy}
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        answer = {
            "ok": False,
            "kind": "os",
            "message": f"{where}{error.strerror}",
            "errno": error.errno,
        }
    except Exception as error:  # the client shall hear of a defect of ours, too
        traceback.print_exc()
        answer = {"ok": False, "kind": "agent", "message": f"{type(error).__name__}: {error}"}
    port.answer(answer)
    while True:  # the client closes
        port.pull()


def session(fd, data, done):
    """Serve one port until its client is gone, then give the port back."""
    try:
        serve(Port(fd, data))
    except Gone:
        pass
    except Exception:
        traceback.print_exc()
    finally:
        done(fd)


def find_ports():
    """The virtio-serial ports that are ours."""
    base = "/sys/class/virtio-ports"
    found = []
    for entry in os.listdir(base):
        with open(f"{base}/{entry}/name") as file:
            if file.read().startswith("emu.agent"):
                found.append(f"/dev/{entry}")
    return found


def main():
    """Wait for clients: edge-triggered, as an unconnected port is always readable (end of file)."""
    epoll = select.epoll()

    def watch(fd):
        epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    for path in find_ports():
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # nobody is there
            os.write(fd, b"X\0\0\0\0")
        watch(fd)
    print(f"emu: agent at {time.monotonic():.2f}", flush=True)
    while True:
        for fd, _ in epoll.poll():
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                continue
            if data:
                epoll.unregister(fd)
                threading.Thread(target=session, args=(fd, data, watch), daemon=True).start()


main()
