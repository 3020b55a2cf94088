"""The time engine's rule again, in plain Python integers and a heap: an oracle, and the pace to beat."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass
class Link:
    """Times in picoseconds, rates in picoseconds per byte * 2**24."""

    latency_ps: int
    read_rate: int
    write_rate: int
    per_request_ps: int
    busy_until_ps: int = 0

    @classmethod
    def of(cls, latency_ns: float, read: float, write: float, per_request_ns: float) -> Link:
        rates = [int((1000 << 24) / bandwidth + 0.5) for bandwidth in (read, write)]
        return cls(int(latency_ns * 1000 + 0.5), *rates, int(per_request_ns * 1000 + 0.5))


@dataclass
class Path:
    links: list[int]
    one_message: list[bool] = field(default_factory=list)
    write: bool = False
    setup_ps: int = 0
    parallelism: int = 1 << 20


@dataclass
class Op:
    actor: int
    path: int
    nbytes: int
    rows: int
    duration_ns: int
    deps: list[int]
    not_before_ns: int


@dataclass
class Reference:
    links: list[Link] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    actor_busy_ps: dict[int, int] = field(default_factory=dict)

    def transfer_ps(self, number: int, start_ps: int, nbytes: int, rows: int) -> int:
        if nbytes == 0:
            return start_ps
        path = self.paths[number]
        rows = max(rows, 1)
        through = start_ps
        for place, one_message in zip(path.links, path.one_message, strict=True):
            link = self.links[place]
            rate = link.write_rate if path.write else link.read_rate
            by_bytes = (nbytes * rate + (1 << 23)) >> 24
            by_requests = (1 if one_message else rows) * link.per_request_ps
            link.busy_until_ps = max(link.busy_until_ps, start_ps) + max(by_bytes, by_requests)
            through = max(through, link.busy_until_ps)
        latency = sum(self.links[place].latency_ps for place in path.links)
        rounds = -(-rows // path.parallelism)
        return path.setup_ps + max(latency + through, start_ps + latency * rounds)

    def compute_ps(self, actor: int, start_ps: int, duration_ps: int) -> int:
        if actor < 0:
            return start_ps + duration_ps
        end = max(self.actor_busy_ps.get(actor, 0), start_ps) + duration_ps
        self.actor_busy_ps[actor] = end
        return end

    def replay(self, ops: list[Op]) -> tuple[list[int], list[int]]:
        starts, ends = [op.not_before_ns for op in ops], [0] * len(ops)
        waits_for = [len(op.deps) for op in ops]
        successors: list[list[int]] = [[] for _ in ops]
        for number, op in enumerate(ops):
            for dep in op.deps:
                successors[dep].append(number)
        ready = [(starts[number], number) for number, op in enumerate(ops) if not op.deps]
        heapq.heapify(ready)
        while ready:
            _, number = heapq.heappop(ready)
            op = ops[number]
            start_ps = starts[number] * 1000
            if op.path < 0:
                end_ps = self.compute_ps(op.actor, start_ps, op.duration_ns * 1000)
            else:
                end_ps = self.transfer_ps(op.path, start_ps, op.nbytes, op.rows)
            ends[number] = -(-end_ps // 1000)
            for successor in successors[number]:
                starts[successor] = max(starts[successor], ends[number])
                waits_for[successor] -= 1
                if waits_for[successor] == 0:
                    heapq.heappush(ready, (starts[successor], successor))
        return starts, ends
