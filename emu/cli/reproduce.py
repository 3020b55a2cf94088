"""`emu reproduce`: published figures against the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, print_table, progress
from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command("reproduce")
@click.argument("ids", nargs=-1, metavar="[all|ID...]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory for report.html, results.json, and a PNG and a table for each study.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Of selections and of the order of requests.",
)
@click.option("--list", "only_list", is_flag=True, help="Print the ids, and stop.")
@click.option("--dry-run", is_flag=True, help="Print what would be run, and stop.")
@json_option
def command(
    ids: tuple[str, ...],
    out: Path | None,
    seed: int,
    only_list: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compare published figures (SAC, Beluga, XM-Sparse) with what the model predicts, misses included."""
    from emu.study.catalogue import IDS, parse_ids, result_json, run_studies

    chosen = IDS if only_list else parse_ids(ids)
    if only_list or dry_run:
        for name in chosen:
            click.echo(name)
        return
    directory = _directory(out)
    findings = run_studies(chosen, progress, seed)
    result = result_json(findings)
    written = []
    if directory is not None:
        from emu.study.report import write_report

        written = write_report(directory, findings.studies, result)
    if as_json:
        print_json(result)
        return
    _show(findings.studies, result)
    if written:
        click.echo(f"written: {written[-1]} and {len(written) - 1} files beside it")


def _directory(out: Path | None) -> Path | None:
    if out is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}", remedy="name a directory") from error
    return out


def _show(studies: Sequence[Any], result: dict[str, Any]) -> None:
    from emu.study.report import HEADER, cells, settings_table, verdict

    for study in studies:
        click.echo(f"\n{study.id}: {study.title} (model time; parameter set {study.parameters})")
        print_table(HEADER, [cells(row) for row in study.rows])
        for row in study.rows:
            if row.reason:
                click.echo(f"  missed: {row.quantity}: {row.reason}")
    if result["settings"]:
        click.echo("\nSAC's settings that were tried, and what each gives (model time)")
        print_table(*settings_table(result["settings"]))
    click.echo(f"\n{verdict(result)}")
