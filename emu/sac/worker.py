"""A worker process of a run: prefill, decode or oracle; it does what the coordinator's messages say.

It ends when the coordinator does: at the end of its channel, or, while busy, by the kernel's parent-death signal.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from typing import TYPE_CHECKING

from emu.errors import EmuError
from emu.process import die_with_parent
from emu.sac.channel import Channel, ChannelClosed, Message

if TYPE_CHECKING:
    from collections.abc import Sequence


def serve(channel: Channel, names: Sequence[str]) -> None:
    """Answer messages until the coordinator closes the channel.

    The first message is the run's specification. Every other one is `{"role": name, "do": verb, ...}`; its answer is
    any number of `{"progress": n}`, then `{"result": ...}` or `{"error": {"kind", "message", "remedy"}}`.
    """
    try:
        message = channel.receive()
        from emu.sac.plan import RunSpec
        from emu.sac.roles import ROLES  # torch: seconds, in which the coordinator may die

        spec = RunSpec(**message["spec"])
        roles = {name: ROLES[name](spec, lambda: channel.send({"progress": 1})) for name in names}
        while True:
            message = channel.receive()
            channel.send(_answer(roles[message["role"]], message))
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
    """Entry point of `python -m emu.sac.worker ROLE... [--parent PID]`; stdin is the coordinator's socket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("roles", nargs="+", choices=("prefill", "decode", "oracle"))
    parser.add_argument("--parent", type=int)
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # ctrl-C is the coordinator's business: it closes the channel
    serve(Channel(socket.socket(fileno=os.dup(0))), arguments.roles)


if __name__ == "__main__":
    main()
