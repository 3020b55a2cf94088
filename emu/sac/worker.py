"""A worker process of a run: prefill, decode or oracle; it does what the coordinator's messages say.

It ends when the coordinator does: at the end of its channel, or, while busy, by the kernel's parent-death signal.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket

from emu.errors import EmuError
from emu.sac.channel import Channel, ChannelClosed, Message

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends.

    Args:
        parent: pid of the process that started us; if it is gone already, we end at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(channel: Channel, role_name: str) -> None:
    """Answer messages until the coordinator closes the channel.

    The first message is the run's specification. Every other one is `{"do": verb, ...}`; its answer is any number
    of `{"progress": n}`, then `{"result": ...}` or `{"error": {"kind", "message", "remedy"}}`.
    """
    try:
        message = channel.receive()
        from emu.sac.plan import RunSpec
        from emu.sac.roles import ROLES  # torch: seconds, in which the coordinator may die

        spec = RunSpec(**message["spec"])
        role = ROLES[role_name](spec, lambda: channel.send({"progress": 1}))
        while True:
            channel.send(_answer(role, channel.receive()))
    except ChannelClosed:
        return


def _answer(role: object, message: Message) -> Message:
    try:
        return {"result": getattr(role, message["do"])(message)}
    except EmuError as error:
        return {
            "error": {
                "kind": type(error).__name__,
                "message": error.message,
                "remedy": error.remedy,
            }
        }


def main() -> None:
    """Entry point of `python -m emu.sac.worker ROLE --fd N --parent PID`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("prefill", "decode", "oracle"))
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # ctrl-C is the coordinator's business: it closes the channel
    serve(Channel(socket.socket(fileno=arguments.fd)), arguments.role)


if __name__ == "__main__":
    main()
