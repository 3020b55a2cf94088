"""Binding memory to a NUMA node, and proving page by page that it lies there."""

from __future__ import annotations

import errno
import mmap
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emu import _native

if TYPE_CHECKING:
    from emu.store import Rows

_BATCH_PAGES = 16384
_NODES = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")


class NumaWarning(UserWarning):
    """Memory does not lie on the node that was asked for, or nobody can tell."""


@dataclass(frozen=True, slots=True)
class NumaBinding:
    """What became of one request to bind memory.

    Attributes:
        node: the node asked for.
        bound: True when every page was found on that node after it had been touched.
        reason: why not, in one sentence; empty when bound.
        remedy: what to do about it; empty when bound.
        pages_checked: pages whose node the kernel told.
    """

    node: int
    bound: bool
    reason: str = ""
    remedy: str = ""
    pages_checked: int = 0


def parse_node_list(text: str) -> tuple[int, ...]:
    """Nodes of the kernel's list format, ascending: "0-1,3" -> (0, 1, 3)."""
    nodes: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(nodes))


def nodes() -> tuple[int, ...]:
    """Nodes that have memory; empty where the kernel knows no NUMA."""
    try:
        return parse_node_list((_NODES / "has_memory").read_text())
    except OSError:
        return ()


def allowed_nodes() -> tuple[int, ...]:
    """Nodes that this process may allocate from (its cpuset); empty where the kernel does not tell."""
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return parse_node_list(value)
    return ()


def allocate_file(fd: int, nbytes: int, node: int) -> NumaBinding:
    """Give an empty file on tmpfs all its memory on one node; the file keeps that policy for whoever maps it later.

    The policy comes first, so that the kernel takes the pages there at once.

    Returns:
        The outcome, every page checked.

    Raises:
        OSError: the memory cannot be had.
    """
    os.ftruncate(fd, nbytes)
    with mmap.mmap(fd, nbytes) as area:
        array = np.frombuffer(area, np.uint8)
        try:
            refusal = _node_refusal(node, nodes(), allowed_nodes())
            if refusal is None:
                refusal = _errno_refusal(_native.mbind(array.ctypes.data, nbytes, node), "mbind")
            if refusal is not None:
                return NumaBinding(node, False, *refusal)
            os.posix_fallocate(fd, 0, nbytes)
            return _bind(array, node, fresh=False)
        finally:
            del array


def bind(array: Rows, node: int, *, fresh: bool = False) -> NumaBinding:
    """Bind an array's pages to a node, touch them, and check where every one of them lies.

    The content never changes. A page that nobody has written yet is touched by reading, which is enough for
    shared mappings; private memory needs a write, so say fresh=True there.

    Args:
        array: uint8 [nbytes], beginning on a page (a mapping).
        node: the node.
        fresh: nobody else uses the memory yet, so it may be touched by writing back what is there.

    Returns:
        The outcome; when it is not bound, a NumaWarning with reason and remedy was issued too.
    """
    binding = _bind(array, node, fresh)
    if not binding.bound:
        warnings.warn(
            f"memory is not bound to NUMA node {node}: {binding.reason} ({binding.remedy})",
            NumaWarning,
            stacklevel=2,
        )
    return binding


def _bind(array: Rows, node: int, fresh: bool) -> NumaBinding:
    address = array.ctypes.data
    if array.ndim != 1 or not array.flags.c_contiguous or address % mmap.PAGESIZE or not array.size:
        return NumaBinding(
            node, False, "the array is no mapping that begins on a page", "bind the whole mapping"
        )
    refusal = _node_refusal(node, nodes(), allowed_nodes())
    if refusal is None:
        refusal = _errno_refusal(_native.mbind(address, array.nbytes, node), "mbind")
    if refusal is not None:
        return NumaBinding(node, False, *refusal)
    _touch(array, fresh)
    return _verify(address, -(-array.nbytes // mmap.PAGESIZE), node)


def _node_refusal(
    node: int, existing: tuple[int, ...], allowed: tuple[int, ...]
) -> tuple[str, str] | None:
    """(reason, remedy) if the node cannot be had, by what the kernel says before it is asked."""
    if not existing:
        return "this kernel knows no NUMA nodes", "open the store without numa_node"
    listed = ", ".join(map(str, existing))
    if node not in existing:
        return f"there is no node {node} with memory", f"use one of: {listed}"
    if allowed and node not in allowed:
        usable = ", ".join(map(str, allowed))
        return (
            f"node {node} is outside this process's cpuset",
            f"use one of: {usable}; or widen cpuset.mems (docker run --cpuset-mems)",
        )
    return None


def _errno_refusal(number: int, call: str) -> tuple[str, str] | None:
    """(reason, remedy) of a failed system call."""
    if number == 0:
        return None
    reason = f"{call} failed: {os.strerror(number)}"
    if number in {errno.EPERM, errno.EACCES}:
        return (
            reason,
            "the container's seccomp filter wants CAP_SYS_NICE: docker run --cap-add SYS_NICE",
        )
    if number == errno.ENOSYS:
        return reason, "this kernel or sandbox has no NUMA calls: open the store without numa_node"
    if number == errno.ENOMEM:
        return reason, "the node has no room: make the device smaller or use another node"
    return reason, "this mapping cannot be bound: use memory on tmpfs, or a node with room"


def _touch(array: Rows, fresh: bool) -> None:
    """Bring every page in, without changing a byte."""
    one_byte_a_page = array[:: mmap.PAGESIZE]
    if fresh:
        np.copyto(one_byte_a_page, one_byte_a_page.copy())
    else:
        one_byte_a_page.max(initial=0)


def _verify(address: int, pages: int, node: int) -> NumaBinding:
    checked = elsewhere = 0
    found = np.empty(min(pages, _BATCH_PAGES), np.int32)
    for start in range(0, pages, _BATCH_PAGES):
        batch = found[: min(_BATCH_PAGES, pages - start)]
        refusal = _errno_refusal(
            _native.page_nodes(address + start * mmap.PAGESIZE, mmap.PAGESIZE, batch), "move_pages"
        )
        if refusal is not None:
            return NumaBinding(node, False, *refusal, checked)
        told = int((batch >= 0).sum())
        checked += told
        elsewhere += told - int((batch == node).sum())
    return _verdict(node, pages, checked, elsewhere)


def _verdict(node: int, pages: int, checked: int, elsewhere: int) -> NumaBinding:
    if elsewhere:
        return NumaBinding(
            node,
            False,
            f"{elsewhere} of {pages} pages lie on another node",
            "the policy of a regular file's mapping is ignored, and pages that others map are not moved: put the "
            "device on tmpfs and bind it before others open it",
            checked,
        )
    if checked < pages:
        return NumaBinding(
            node,
            False,
            f"the kernel does not tell where {pages - checked} of {pages} pages lie",
            "private memory must be bound while it is fresh; a devdax device has a fixed node (target_node in sysfs)",
            checked,
        )
    return NumaBinding(node, True, pages_checked=checked)
