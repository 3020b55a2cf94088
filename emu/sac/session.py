"""The coordinator of a run: the same requests through every design, each checked against the oracle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from emu.sac.figures import Verdict, run_figures
from emu.sac.media import Media, pool_urls
from emu.sac.processes import Call, WorkerProcess, call_all
from emu.sac.report import oplog_name
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
        testbed: prefill runs on its first host, decode on its last, the oracle beside prefill.
        oplog_dir: where each design's operation log and the selections are kept, None keeps none.
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
        try:
            self._prefill, self._decode, self._oracle = (
                self._start(role, asdict(spec)) for role in ("prefill", "decode", "oracle")
            )
        except BaseException:
            self.close()
            raise

    def _start(self, role: str, spec: dict[str, Any]) -> WorkerProcess:
        bed = self._setting.testbed
        worker = WorkerProcess(role, bed.hosts[-1 if role == "decode" else 0], spec, bed)
        self._workers.append(worker)
        return worker

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
        with pool_urls(design, self._setting.media, self._setting.testbed) as urls:
            where = {
                "urls": urls,
                "coherent": self._setting.testbed.coherence == "bi",
                "requests": self._requests,
            }
            deliveries = self._prefill_and_oracle(design, where)
            self._progress.phase(f"{design.name}: decode")
            decoded = self._call(self._decode, self._decode_message(design, where, deliveries))
            records = sorted(
                (Record.from_json(data) for data in decoded["records"]), key=lambda r: r.number
            )
            self._progress.phase(f"{design.name}: compare every byte")
            verdict = self._verify(where, records, decoded["descriptors"])
            for worker in (self._decode, self._prefill):
                self._call(worker, {"do": "release"})
        return run_figures(design.name, decoded["clock"], records, decoded["totals"], verdict)

    def _call(self, worker: WorkerProcess, message: dict[str, Any]) -> Any:
        return call_all([Call(worker, message)], self._workers, self._progress.tick)[0]

    def _prefill_and_oracle(self, design: Design, where: dict[str, Any]) -> list[dict[str, Any]]:
        """Prefill; beside the first one the oracle does its in-memory run on the other core."""
        calls = [Call(self._prefill, {"do": "prefill", **where})]
        if self._oracle_done:
            self._progress.phase(f"{design.name}: prefill")
        else:
            self._progress.phase(f"{design.name}: prefill, and the in-memory oracle")
            calls.append(Call(self._oracle, {"do": "oracle", "requests": self._requests}))
        deliveries: list[dict[str, Any]] = call_all(calls, self._workers, self._progress.tick)[0]
        self._oracle_done = True
        return deliveries

    def _decode_message(
        self, design: Design, where: dict[str, Any], deliveries: list[dict[str, Any]]
    ) -> dict[str, Any]:
        oplog_dir = self._setting.oplog_dir
        return {
            "do": "decode",
            **where,
            "design": design.name,
            "deliveries": deliveries,
            "copy_bytes": self._setting.media.copy_bytes,
            "oplog": str(oplog_dir / oplog_name(design.name)) if oplog_dir else "",
            "recordings": str(oplog_dir) if oplog_dir else "",
        }

    def _verify(
        self, where: dict[str, Any], records: list[Record], descriptors: dict[str, str]
    ) -> Verdict:
        tokens = {str(record.number): record.tokens for record in records}
        message = {"do": "verify", **where, "descriptors": descriptors, "tokens": tokens}
        verdicts = self._call(self._oracle, message)
        return Verdict(
            tokens_match=all(v["tokens"] for v in verdicts),
            kv_bytes_match=not any(v["difference"] for v in verdicts),
            differences=tuple(
                f"request {plan.number}: {v['difference'] or 'tokens differ'}"
                for plan, v in zip(self._plans, verdicts, strict=True)
                if v["difference"] or not v["tokens"]
            ),
        )
