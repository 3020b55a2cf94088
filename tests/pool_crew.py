"""Processes that use one pool at random, for the tests that kill and stop them; every byte that they read is checked."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from dataclasses import dataclass

from small_pool import LAYOUT, read_slot, rows_of

from emu import StoreOptions, open_store
from emu.errors import HostExpired, KeyMissing, MediumError, StaleDescriptor, StoreFull

EXPIRY_S = 2.0


@dataclass(frozen=True)
class Job:
    """What one process of the crew gets.

    Attributes:
        device: path of the pool's device.
        journal: file to which each appends a line for what it has published.
        name: unlike that of any other, ever.
        coherent: whether its store trusts the hardware.
    """

    device: str
    journal: str
    name: str
    coherent: bool = True


def open_pool(job):
    options = StoreOptions(expiry_s=EXPIRY_S, coherent=job.coherent)
    return open_store(f"cxl://{job.device}", LAYOUT, options)


def tokens_of(key):
    """Prompt tokens of a key: the last part of its name."""
    return int(key.rsplit("-", 1)[1])


def prefix_hashes(key):
    """One block that all keys of a family share, if the prompt is that long."""
    return [f"family{family_of(key)}".ljust(16).encode()] if tokens_of(key) >= 64 else []


def family_of(key):
    return int(key.rsplit("-", 2)[1])


def content_of(key, num_tokens):
    """The rows of a key: a shared first block, the rest its own; appended rows too."""
    rows = rows_of(key, num_tokens)["kv"]
    if tokens_of(key) >= 64:
        rows[:, :64] = rows_of(f"family{family_of(key)}", 64)["kv"]
    return rows


def append_rows(store, slot, key, first, last):
    import numpy as np

    rows = content_of(key, last)
    for layer in range(2):
        part = np.ascontiguousarray(rows[layer : layer + 1, first:last])
        store.append(np.array([slot]), layer, np.array([first], np.int32), part)


def check_slot(store, slot, key):
    rows = read_slot(store, slot)
    if not (rows == content_of(key, rows.shape[1])).all():
        raise AssertionError(f"wrong bytes of {key} in slot {slot}")
    return rows.shape[1]


class Worker:
    """One process's random life; `round()` is one step of it."""

    def __init__(self, job):
        self.job = job
        self.random = random.Random(job.name)
        self.journal = os.open(job.journal, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self.store = open_pool(job)
        self.mine = {}  # key -> slot
        self.number = 0
        self.expired = self.full = self.checked = self.lives = 0

    def round(self):
        try:
            self.random.choice((self.publish, self.look_up, self.look_up, self.append, self.drop))()
        except StoreFull:
            self.full += 1
            self.drop()
        except (KeyMissing, StaleDescriptor):
            pass  # evicted or deleted just now
        except HostExpired:
            self.expired += 1
            self.reopen()

    def reopen(self):
        self.store.close()
        self.mine.clear()
        deadline = time.monotonic() + 30
        while True:
            try:
                self.store = open_pool(self.job)
            except MediumError as error:  # every slot is taken until the dead are known to be
                if error.status != "NO_SLOT" or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def publish(self):
        self.number += 1
        tokens = self.random.choice((3, 64, 70, 130, 200))
        key = f"{self.job.name}-{self.number}-{self.random.randrange(3)}-{tokens}"
        made = self.store.reserve(
            key, tokens, block_hashes=prefix_hashes(key), append_tokens=self.random.choice((0, 9))
        )
        self.mine[key] = made.slot
        append_rows(self.store, made.slot, key, made.shared_tokens, tokens)
        self.store.publish(key)
        os.write(self.journal, f"{key}\n".encode())
        assert self.store.exists([key])[0], f"{key} is lost"
        self.check(made.slot, key)

    def look_up(self):
        end = os.lseek(self.journal, 0, os.SEEK_END)
        recent = os.pread(self.journal, 2000, max(0, end - 2000)).decode().splitlines()[1:]
        if not recent:
            return
        key = self.random.choice(recent)
        slot = self.store.attach(self.store.publish(key))
        self.check(slot, key)
        self.store.detach(slot)

    def append(self):
        key, slot = self.pick()
        if key is None:
            return
        length = self.store.length(slot)
        if length < tokens_of(key) + 9 and self.store._held.tables.capacity(slot) > length:
            append_rows(self.store, slot, key, length, length + 1)
            assert self.store.publish(key).num_tokens == length + 1
        self.check(slot, key)

    def drop(self):
        key, slot = self.pick()
        if key is None:
            return
        del self.mine[key]
        if self.random.random() < 0.5:
            self.store.detach(slot)
        else:
            self.store.delete([key])

    def pick(self):
        return self.random.choice(list(self.mine.items())) if self.mine else (None, None)

    def check(self, slot, key):
        check_slot(self.store, slot, key)
        self.checked += 1


def live(pipe, job):
    """A worker's process: it works until it is told to end, and says what it saw."""
    worker = Worker(job)
    pipe.send("started")
    rounds = 0
    while not pipe.poll():
        worker.round()
        rounds += 1
        if rounds == 300:
            early = footprint()
    pipe.send(
        (rounds, worker.checked, worker.expired, early if rounds > 300 else None, footprint())
    )
    worker.store.close()
    pipe.send("closed")


def footprint():
    """(open files, resident bytes) of this process."""
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: PTH123, SIM115
    return len(os.listdir("/proc/self/fd")), resident  # noqa: PTH208


class Crew:
    """Worker processes by name; a killed one is replaced by a new one."""

    def __init__(self, device, journal, count):
        self.device, self.journal = device, journal
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["pool_crew"])
        self.started = 0
        self.members = []
        for _ in range(count):
            self.start()

    def start(self):
        self.started += 1
        ours, theirs = self.context.Pipe()
        job = Job(str(self.device), str(self.journal), f"w{self.started}", self.started % 2 == 0)
        process = self.context.Process(target=live, args=(theirs, job), daemon=True)
        process.start()
        theirs.close()
        assert ours.poll(60), "a worker did not start"
        ours.recv()
        self.members.append((process, ours))

    def kill_one(self, chosen):
        process, pipe = self.members.pop(chosen.randrange(len(self.members)))
        assert process.is_alive(), f"a worker failed with {process.exitcode}"
        process.kill()
        process.join()
        pipe.close()
        self.start()

    def finish(self):
        """Let everybody end; what each saw."""
        seen = []
        for _, pipe in self.members:
            pipe.send("end")
        for process, pipe in self.members:
            assert pipe.poll(60), f"a worker hangs or failed with {process.exitcode}"
            seen.append(pipe.recv())
            assert pipe.recv() == "closed"
            process.join()
            assert process.exitcode == 0
        self.members = []
        return seen

    def end(self):
        for process, pipe in self.members:
            process.kill()
            process.join()
            pipe.close()
