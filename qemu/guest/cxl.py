"""The guest's CXL devices by plain sysfs: regions and devdax nodes, named by serial numbers, and their modes."""

import glob
import json
import os
import subprocess
import time

BUS = "/sys/bus/cxl/devices"
DAX = "/sys/bus/dax"
MEMORY = "/sys/devices/system/memory"
NODES = "/sys/devices/system/node"
PROBE_TIMEOUT_S = 60.0
GRANULARITY_BYTES = 256

STATE = "/run/emu/regions.json"  # what setup() was asked for: an agent that comes after this one needs it, too


class DeviceError(Exception):
    """A device cannot do what was asked."""

    def __init__(self, message, remedy=""):
        super().__init__(message)
        self.remedy = remedy


def _read(path):
    with open(path) as file:
        return file.read().strip()


def _write(path, value):
    """Write one value; a refusal names the file, the value and the kernel's reason."""
    try:
        with open(path, "w") as file:
            file.write(str(value))
    except OSError as error:
        raise DeviceError(f"{path} refuses {value}: {error.strerror}", _remedy(error)) from error


def _remedy(error):
    if error.errno == 6 and "commit" in str(error.filename):
        return "the kernel cannot flush CPU caches: the guest's CPU needs -hypervisor"
    return "see the guest's console: emu logs HOST-console"


def setup(wanted):
    """Make the regions that are not there yet; returns report().

    Args:
        wanted: the serials of each region's devices, in the order of the interleave.
    """
    with open(STATE, "w") as file:
        json.dump(wanted, file)
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    serials = [serial for region in wanted for serial in region]
    while True:
        memdevs = _endpoints()
        missing = [serial for serial in serials if serial not in memdevs]
        roots = _root_decoders()
        if not missing and len(roots) >= len(wanted):
            break
        if time.monotonic() > deadline:
            what = (
                f"no device of serial {missing[0]}" if missing else f"{len(roots)} memory windows"
            )
            raise DeviceError(f"the guest's kernel found {what} in {PROBE_TIMEOUT_S:.0f} s")
        time.sleep(0.02)
    for members, root in zip(wanted, roots, strict=False):
        region = _find_region(members) or _make_region(
            root, [memdevs[serial] for serial in members]
        )
        _wait_for(lambda region=region: _dax_of(region), f"{region} has no dax device")
        dax = _dax_of(region)
        if _driver(dax) is None:
            _write(f"{DAX}/drivers/device_dax/new_id", dax)
        _wait_for(lambda dax=dax: _driver(dax), f"{dax} has no driver")
        if _driver(dax) == "device_dax":
            _wait_for(lambda dax=dax: os.path.exists(f"/dev/{dax}"), f"no /dev/{dax}")
    return report()


def _wait_for(found, words, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not found():
        if time.monotonic() > deadline:
            raise DeviceError(f"{words} after {timeout_s:.0f} s", "see the guest's console")
        time.sleep(0.01)


def _endpoints():
    """The first decoder of each memory device that is ready, by serial (memN numbers differ at each boot)."""
    found = {}
    for endpoint in glob.glob(f"{BUS}/endpoint*"):
        try:
            serial = int(_read(f"{endpoint}/uport/serial"), 0)
        except OSError:  # it comes or goes
            continue
        decoder = f"decoder{os.path.basename(endpoint)[len('endpoint') :]}.0"
        if os.path.exists(f"{BUS}/{decoder}/mode"):
            found[serial] = decoder
    return found


def _root_decoders():
    """Root decoders that make RAM regions, by address: one for each window, in the testbed's order."""
    found = [os.path.dirname(path) for path in glob.glob(f"{BUS}/decoder*/create_ram_region")]
    return sorted(found, key=lambda path: int(_read(f"{path}/start"), 0))


def _region_paths():
    return sorted(glob.glob(f"{BUS}/region*"))


def _find_region(members):
    """The name of the region that these devices form already, None without one."""
    wanted = [_endpoints().get(serial) for serial in members]
    for path in _region_paths():
        targets = [_read(f"{path}/target{i}") for i in range(int(_read(f"{path}/interleave_ways")))]
        if targets == wanted and _read(f"{path}/commit") == "1":
            return os.path.basename(path)
    return None


def _make_region(root, decoders):
    name = _read(f"{root}/create_ram_region")
    _write(f"{root}/create_ram_region", name)
    region = f"{BUS}/{name}"
    try:
        nbytes = int(_read(f"{root}/size"), 0)
        _write(f"{region}/interleave_granularity", GRANULARITY_BYTES)
        _write(f"{region}/interleave_ways", len(decoders))
        _write(f"{region}/size", nbytes)
        for number, decoder in enumerate(decoders):
            _write(f"{BUS}/{decoder}/mode", "ram")
            _write(f"{BUS}/{decoder}/dpa_size", nbytes // len(decoders))
            _write(f"{region}/target{number}", decoder)
        _write(f"{region}/commit", 1)
        _write("/sys/bus/cxl/drivers/cxl_region/bind", name)
    except DeviceError:
        _write(f"{root}/delete_region", name)
        raise
    return name


def _dax_of(region):
    """The dax device of a region, "" before there is one."""
    found = glob.glob(f"{BUS}/{region}/dax_region*/dax*.*")
    return os.path.basename(found[0]) if found else ""


def _driver(dax):
    try:
        return os.path.basename(os.readlink(f"{DAX}/devices/{dax}/driver"))
    except OSError:
        return None


def _node(dax):
    return int(_read(f"{DAX}/devices/{dax}/target_node"))


def _wanted():
    """Serials of each region's devices, in the testbed's order; none before the set-up."""
    try:
        with open(STATE) as file:
            return json.load(file)
    except FileNotFoundError:
        return []


def report():
    """Every region as it is: serials, path, bytes, NUMA node and mode."""
    rows = []
    for members in _wanted():
        region = _find_region(members)
        dax = _dax_of(region) if region else ""
        row = {"serials": members, "path": None, "mode": "removed", "size_bytes": 0, "node": None}
        if dax:
            mode = {"device_dax": "devdax", "kmem": "system-ram"}.get(_driver(dax), "unbound")
            row.update(path=f"/dev/{dax}", mode=mode, node=_node(dax))
            row["size_bytes"] = int(_read(f"{DAX}/devices/{dax}/size"))
        rows.append(row)
    return rows


def environment():
    """What programs get: paths of the devdax devices, and NUMA nodes of those that are system RAM."""
    rows = report()
    env = {"EMU_CXL_DEVICES": ":".join(row["path"] for row in rows if row["mode"] == "devdax")}
    nodes = [str(row["node"]) for row in rows if row["mode"] == "system-ram"]
    return {**env, "EMU_CXL_NODES": ",".join(nodes)} if nodes else env


def set_mode(serial, mode):
    """Make the region that this device belongs to "devdax" or "system-ram"; returns its row of report()."""
    for row in report():
        if serial in row["serials"] and row["path"]:
            break
    else:
        raise DeviceError(f"no device of serial {serial}")
    dax = os.path.basename(row["path"])
    if row["mode"] != mode:
        if mode == "system-ram":
            _to_system_ram(dax)
        else:
            _to_devdax(dax, row)
    return next(row for row in report() if serial in row["serials"])


def _to_system_ram(dax):
    users = _users_of_file(f"/dev/{dax}")
    if users:
        raise DeviceError(f"/dev/{dax} is in use by process {', '.join(users)}", "end it first")
    _load("kmem")
    if _driver(dax) == "device_dax":
        _write(f"{DAX}/drivers/device_dax/unbind", dax)
        _write(f"{DAX}/drivers/device_dax/remove_id", dax)
    _write(f"{DAX}/drivers/kmem/new_id", dax)
    _wait_for(lambda: _driver(dax) == "kmem", f"{dax} is not taken by kmem")
    for block in _memory_blocks(dax):
        if _read(f"{block}/state") != "online":
            _write(f"{block}/state", "online_movable")


def _to_devdax(dax, row):
    users = _users_of_node(row["node"])
    if users:
        raise DeviceError(
            f"memory of node {row['node']} is in use by process {', '.join(users)}", "end it first"
        )
    for block in _memory_blocks(dax):
        if _read(f"{block}/state") != "offline":
            _offline(block, row["node"])
    _write(f"{DAX}/drivers/kmem/unbind", dax)
    _write(f"{DAX}/drivers/kmem/remove_id", dax)
    _write(f"{DAX}/drivers/device_dax/new_id", dax)
    _wait_for(lambda: os.path.exists(f"/dev/{dax}"), f"no /dev/{dax}")


def _offline(block, node, timeout_s=30.0):
    """Take a memory block offline; the kernel would try for ever while a page is pinned, a signal ends that."""
    writer = subprocess.Popen(
        ["/run/emu/busybox", "sh", "-c", 'echo offline >"$1"', "sh", f"{block}/state"],
        stderr=subprocess.PIPE,
    )
    try:
        _, words = writer.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        writer.kill()
        writer.communicate()
        words = b"the kernel did not get it free"
    if _read(f"{block}/state") != "offline":
        raise DeviceError(
            f"memory of node {node} is in use: {words.decode(errors='replace').strip()}",
            "end the programs that use it",
        )


def _memory_blocks(dax):
    """The memory blocks of a dax device."""
    block_bytes = int(_read(f"{MEMORY}/block_size_bytes"), 16)
    region = next(path for path in _region_paths() if _dax_of(os.path.basename(path)) == dax)
    start = int(_read(f"{region}/resource"), 0)
    end = start + int(_read(f"{region}/size"), 0)
    blocks = [f"{MEMORY}/memory{n}" for n in range(start // block_bytes, end // block_bytes)]
    return [block for block in blocks if os.path.exists(block)]


def _users_of_file(path):
    """Pids that have a file open or mapped."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = glob.glob(f"/proc/{pid}/fd/*")
            if any(os.readlink(link) == path for link in links) or f" {path}\n" in _maps(pid):
                found.append(pid)
        except OSError:  # it ended meanwhile
            continue
    return found


def _maps(pid):
    with open(f"/proc/{pid}/maps") as file:
        return file.read()


def _users_of_node(node):
    """Pids with pages on a node."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/numa_maps") as file:
                if f" N{node}=" in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


def _load(module):
    """Load a kernel module, unless it is there."""
    if os.path.exists(f"/sys/module/{module}"):
        return
    with open(f"/run/emu/later/{module}") as order:
        for name in order.read().split():
            if not os.path.exists(f"/sys/module/{name}"):
                path = f"/run/emu/modules/{name}.ko"
                subprocess.run(["/run/emu/busybox", "insmod", path], check=True)
