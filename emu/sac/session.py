"""The coordinator of a run: the same requests through every design, each checked against the oracle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from emu.guest.files import get_file
from emu.sac.figures import Verdict, run_figures
from emu.sac.media import GUEST_RUN, Media, Pool, open_pool
from emu.sac.processes import Call, WorkerProcess, call_all
from emu.sac.sequence import Record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from emu.provision.testbed import Testbed
    from emu.sac.designs import Design
    from emu.sac.plan import RequestPlan, RunSpec


_END_S = 1.0
"""How long a worker may take to end by itself."""


class Progress(Protocol):
    """Whom the session tells how far it is."""

    def phase(self, text: str) -> None:
        """A new phase begins."""
        ...

    def tick(self) -> None:
        """One unit of the run's work (see work_units) is done."""
        ...


def work_units(plans: Sequence[RequestPlan], designs: Sequence[Design]) -> int:
    """Ticks of a whole run: oracle, then prefill, every output token and verification for each design."""
    tokens = sum(plan.request.output_tokens for plan in plans)
    return len(plans) + len(designs) * (2 * len(plans) + tokens)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a run takes place.

    Attributes:
        media: memory and devices.
        testbed: prefill runs on its first host, decode on its last.
        oplog_dir: where each design's operation log is kept, None keeps none.
    """

    media: Media
    testbed: Testbed
    oplog_dir: Path | None = None


class Session:
    """A run's workers, and the designs one after the other.

    Args:
        spec: what to run.
        plans: the requests.
        setting: where.
        progress: whom to tell.
    """

    def __init__(
        self, spec: RunSpec, plans: Sequence[RequestPlan], setting: Setting, progress: Progress
    ) -> None:
        self._setting, self._progress = setting, progress
        self._plans = plans
        self._requests = [plan.to_json() for plan in plans]
        self._oracle_done = False
        self._workers: list[WorkerProcess] = []
        self._players: dict[str, WorkerProcess] = {}
        try:
            for host, roles in self._places():
                worker = WorkerProcess(roles, host, asdict(spec), setting.testbed)
                self._workers.append(worker)
                self._players |= dict.fromkeys(roles, worker)
        except BaseException:
            self.close()
            raise

    def _places(self) -> list[tuple[str, tuple[str, ...]]]:
        """Host and roles of each worker.

        In guests every import of torch costs half a minute of their one CPU: the oracle's work is done by the
        decode worker, which has nothing to do meanwhile.
        """
        first, last = self._setting.testbed.hosts[0], self._setting.testbed.hosts[-1]
        if self._setting.testbed.record.guests:
            return [(first, ("prefill",)), (last, ("decode", "oracle"))]
        return [(first, ("prefill",)), (last, ("decode",)), (first, ("oracle",))]

    def _borrow(self) -> bool:
        """Whether the last host shares the devices with the first one, but no directory."""
        bed = self._setting.testbed
        return bool(bed.record.guests) and len(bed.hosts) > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.end(_END_S)

    def run(self, design: Design) -> dict[str, Any]:
        """One design, from prefill to reclaim; its entry of "runs".

        Raises:
            WorkerError, EmuError: a worker failed or died.
        """
        with open_pool(design, self._setting.media, self._setting.testbed) as pool:
            deliveries = self._prefill_and_oracle(design, self._where(pool.urls, pool))
            self._progress.phase(f"{design.name}: decode")
            far = {**self._where(pool.far_urls, pool), "borrow": self._borrow()}
            decoded = self._call("decode", self._decode_message(design, far, deliveries))
            self._fetch_oplog(design)
            records = sorted(
                (Record.from_json(data) for data in decoded["records"]), key=lambda r: r.number
            )
            self._progress.phase(f"{design.name}: compare every byte")
            verdict = self._verify(far, records, decoded["descriptors"])
            for role in ("decode", "prefill"):
                self._call(role, {"do": "release"})
        transport = decoded["transport"]
        figures = run_figures(design.name, decoded["clock"], records, decoded["totals"], verdict)
        return {**figures, "transport": transport} if transport else figures

    def _where(self, urls: list[str], pool: Pool) -> dict[str, Any]:
        return {
            "urls": urls,
            "transport": pool.transport,
            "coherent": self._setting.testbed.coherence == "bi",
            "requests": self._requests,
        }

    def _to(self, role: str, message: dict[str, Any]) -> Call:
        return Call(self._players[role], {"role": role, **message})

    def _call(self, role: str, message: dict[str, Any]) -> Any:
        return call_all([self._to(role, message)], self._workers, self._progress.tick)[0]

    def _prefill_and_oracle(self, design: Design, where: dict[str, Any]) -> list[dict[str, Any]]:
        """Prefill; beside the first one the oracle does its in-memory run on the other core."""
        calls = [self._to("prefill", {"do": "prefill", **where})]
        if self._oracle_done:
            self._progress.phase(f"{design.name}: prefill")
        else:
            self._progress.phase(f"{design.name}: prefill, and the in-memory oracle")
            calls.append(self._to("oracle", {"do": "oracle", "requests": self._requests}))
        deliveries: list[dict[str, Any]] = call_all(calls, self._workers, self._progress.tick)[0]
        self._oracle_done = True
        return deliveries

    def _decode_message(
        self, design: Design, where: dict[str, Any], deliveries: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "do": "decode",
            **where,
            "design": design.name,
            "deliveries": deliveries,
            "copy_bytes": self._setting.media.copy_bytes,
            "oplog": self._oplog(design),
        }

    def _oplog(self, design: Design) -> str:
        """Where the decode worker writes its operation log, as it sees that place; "" for nowhere."""
        directory = self._setting.oplog_dir
        if directory is None:
            return ""
        inside = self._setting.testbed.guest(self._setting.testbed.hosts[-1]) is not None
        return f"{GUEST_RUN if inside else directory}/ops-{design.name}.jsonl"

    def _fetch_oplog(self, design: Design) -> None:
        """A guest's writes stay in the guest: bring the log out."""
        directory = self._setting.oplog_dir
        guest = self._setting.testbed.guest(self._setting.testbed.hosts[-1])
        if directory is not None and guest is not None:
            get_file(guest, self._oplog(design), directory / f"ops-{design.name}.jsonl")

    def _verify(
        self, where: dict[str, Any], records: list[Record], descriptors: dict[str, str]
    ) -> Verdict:
        tokens = {str(record.number): record.tokens for record in records}
        message = {
            "do": "verify",
            **where,
            "descriptors": descriptors,
            "tokens": tokens,
        }
        verdicts = self._call("oracle", message)
        return Verdict(
            tokens_match=all(v["tokens"] for v in verdicts),
            kv_bytes_match=not any(v["difference"] for v in verdicts),
            differences=tuple(
                f"request {plan.number}: {v['difference'] or 'tokens differ'}"
                for plan, v in zip(self._plans, verdicts, strict=True)
                if v["difference"] or not v["tokens"]
            ),
        )
