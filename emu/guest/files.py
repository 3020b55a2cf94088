"""Files into and out of guests."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.guest.session import checked, open_session

if TYPE_CHECKING:
    from pathlib import Path

    from emu.guest.guest import Guest

CHUNK = 1 << 18


def put_file(guest: Guest, source: Path, target: str) -> None:
    """Copy a file of this machine into a guest, with its permissions; it appears there when it is complete.

    Raises:
        UserError: it cannot be read here or written there.
        GuestSilent: the guest is gone.
    """
    try:
        with source.open("rb") as file, open_session(guest.directory, guest.ports) as session:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            session.request(do="put", path=target, mode=mode)
            while data := file.read(CHUNK):
                session.send(b"i", data)
            session.send(b"c")
            session.answer()
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from error


def get_file(guest: Guest, source: str, target: Path) -> None:
    """Copy a guest's file to this machine; it appears here when it is complete.

    Raises:
        UserError, GuestSilent: as put_file.
    """
    draft = target.with_name(f".{target.name}.emu-part")
    try:
        with draft.open("wb") as file, open_session(guest.directory, guest.ports) as session:
            session.request(do="get", path=source)
            while True:
                for kind, body in session.frames():
                    if kind == b"A":
                        mode = checked(json.loads(body))["mode"]
                        draft.chmod(mode)
                        draft.replace(target)
                        return
                    file.write(body)
    except OSError as error:
        raise UserError(f"{target}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
