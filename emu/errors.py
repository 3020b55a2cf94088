"""Every error emu raises: what failed, the facts as fields, and what to do next."""

from __future__ import annotations


class EmuError(Exception):
    """Base of all errors of emu.

    Args:
        message: what failed, in one sentence.
        remedy: what the user can do about it; may be empty.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class UserError(EmuError, ValueError):
    """A flag, spec file, trace or argument that cannot be right."""


class ArgumentTypeError(UserError, TypeError):
    """An argument of a wrong type."""


class ProgramError(UserError):
    """A program that cannot be started on a host.

    Args:
        program: as it was named.
        shell_status: what a shell exits with then: 127 for one that is not there, 126 for one that cannot be run.
    """

    def __init__(self, message: str, *, program: str, shell_status: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.program = program
        self.shell_status = shell_status


class HostError(EmuError):
    """This machine lacks a capability.

    Args:
        capability: the name that `emu doctor` uses.
    """

    def __init__(self, message: str, *, capability: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.capability = capability


class TestbedError(EmuError):
    """A testbed cannot be made, found or used.

    Args:
        name: the testbed's name.
    """

    __test__ = False  # not a test class, whatever its name says

    def __init__(self, message: str, *, name: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.name = name


class WorkerError(EmuError):
    """A process that emu started failed or died.

    Args:
        role: what the process was, for instance "decode".
        exit_status: its exit status, negative for a signal, None while unknown.
        log_tail: the last lines that it wrote.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str,
        exit_status: int | None = None,
        log_tail: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.role = role
        self.exit_status = exit_status
        self.log_tail = log_tail


class DeadlockError(EmuError):
    """Actors of a clock wait for signals that nobody can fire any more.

    Args:
        waiting: name of the signal that each actor waits for, by the actor's name.
    """

    def __init__(self, waiting: dict[str, str]) -> None:
        listed = ", ".join(f"{actor} for {signal}" for actor, signal in waiting.items())
        super().__init__(
            f"every actor waits: {listed}", remedy="fire the signal, or end the actor that waits"
        )
        self.waiting = waiting


class StoreError(EmuError):
    """A KV store cannot do what was asked."""


class KeyMissing(StoreError, KeyError):
    """A key that the store does not hold.

    Args:
        key: the key.
        device: the store's device.
    """

    __str__ = EmuError.__str__

    def __init__(self, key: str, *, device: str) -> None:
        super().__init__(f"{device}: no request {key!r}")
        self.key = key
        self.device = device


class KeyExists(StoreError):
    """A key that the store holds already.

    Args:
        key: the key.
        device: the store's device.
    """

    def __init__(self, key: str, *, device: str) -> None:
        super().__init__(
            f"{device}: request {key!r} exists already", remedy="delete it first or use another key"
        )
        self.key = key
        self.device = device


class SlotStale(StoreError):
    """A slot that names no request (any more).

    Args:
        slot: the slot.
        device: the store's device.
    """

    def __init__(self, slot: int, *, device: str) -> None:
        super().__init__(
            f"{device}: slot {slot} names no request", remedy="ask slots() again after a delete"
        )
        self.slot = slot
        self.device = device


class TokenMissing(StoreError, IndexError):
    """A token index that was never written.

    Args:
        device: the store's device.
        key: the request.
        component: the layout's component.
        layer: the model layer.
        token: the offending token index.
        length: the tokens that the request holds in this layer.
    """

    def __init__(
        self, *, device: str, key: str, component: str, layer: int, token: int, length: int
    ) -> None:
        super().__init__(
            f"{device}: request {key!r} holds {length} tokens of {component} in layer {layer}, not token {token}"
        )
        self.device = device
        self.key = key
        self.component = component
        self.layer = layer
        self.token = token
        self.length = length


class StoreFull(StoreError):
    """No room, even after everything that nobody holds was evicted.

    Args:
        device: the store's device.
        needed_bytes: what was asked for.
        free_bytes: what is free.
        capacity_bytes: what the device holds in all.
    """

    def __init__(
        self, *, device: str, needed_bytes: int, free_bytes: int, capacity_bytes: int
    ) -> None:
        super().__init__(
            f"{device}: {needed_bytes} bytes needed, {free_bytes} of {capacity_bytes} free",
            remedy="delete requests, or make the device larger",
        )
        self.device = device
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.capacity_bytes = capacity_bytes


class LayoutMismatch(StoreError):
    """Two sides disagree about the layout of the KV rows.

    Args:
        device: the store's device.
        found: fingerprint found there, hexadecimal; of the other side nothing more is known.
        expected: fingerprint of this side, hexadecimal.
        rows: of this side, in words.
    """

    def __init__(
        self, *, device: str, found: str, expected: str, rows: str, remedy: str = ""
    ) -> None:
        super().__init__(
            f"{device}: layout {found} found, {expected} expected ({rows})", remedy=remedy
        )
        self.rows = rows
        self.device = device
        self.found = found
        self.expected = expected


class StaleDescriptor(StoreError):
    """A descriptor whose request is gone, or is not on this device.

    Args:
        device: the store's device.
        key: the request's key.
        generation: the descriptor's generation.
        belongs_to: uuid of the device that the descriptor is of, hexadecimal.
        uuid: uuid of this device, hexadecimal; it is new at every format.
    """

    def __init__(
        self, *, device: str, key: str, generation: int, belongs_to: str, uuid: str
    ) -> None:
        if belongs_to == uuid:
            message = f"{device}: request {key!r} of generation {generation} is gone"
            remedy = "publish it again"
        else:
            message = f"{device}: the descriptor of request {key!r} belongs to device {belongs_to}, this is {uuid}"
            remedy = (
                "attach on the device that published it, or publish again if this one was made anew"
            )
        super().__init__(message, remedy=remedy)
        self.device = device
        self.key = key
        self.generation = generation
        self.belongs_to = belongs_to
        self.uuid = uuid


class MediumError(StoreError):
    """The medium beneath a store failed: a dead memory node, a truncated device, a work request in error.

    Args:
        device: the store's device.
        status: the field's own name of the fault, for instance "IBV_WC_REM_ACCESS_ERR".
    """

    def __init__(self, message: str, *, device: str, status: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.device = device
        self.status = status


class HostExpired(StoreError):
    """This store was paused or unreachable for longer than its leases last; it has stopped, others have its place.

    Args:
        device: the store's device.
        reason: how it was noticed.
    """

    def __init__(self, *, device: str, reason: str) -> None:
        super().__init__(
            f"{device}: this store has stopped: {reason}",
            remedy="open the store again; what it published is still there unless it was evicted since",
        )
        self.device = device
        self.reason = reason


class StoreClosed(StoreError):
    """A call on a store after close().

    Args:
        device: the store's device.
    """

    def __init__(self, *, device: str) -> None:
        super().__init__(f"{device}: the store is closed", remedy="open it again")
        self.device = device
