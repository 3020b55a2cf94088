"""A worker process of a run: prefill, decode or oracle; it does what the coordinator's messages say.

It ends when the coordinator does: at the end of its channel, or, while busy, by the kernel's parent-death signal.
"""

from __future__ import annotations

import argparse
import signal
import socket

from emu.errors import EmuError
from emu.process import die_with_parent
from emu.sac.channel import Channel, ChannelClosed, Message


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
