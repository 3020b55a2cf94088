"""`emu calibrate`: a media profile from measurements."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date as calendar_date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, print_table
from emu.errors import UserError

if TYPE_CHECKING:
    from emu.calibrate.measured import Measured

_FILE = click.Path(path_type=Path)


@click.command("calibrate")
@click.option("--mlc", type=_FILE, multiple=True, help="What Intel MLC printed.")
@click.option(
    "--from-node",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="MLC: node of the CPU.",
)
@click.option(
    "--node", type=click.IntRange(0), default=0, show_default=True, help="MLC: node of the memory."
)
@click.option("--ib-read-lat", type=_FILE, multiple=True, help="What ib_read_lat printed.")
@click.option("--ib-read-bw", type=_FILE, multiple=True, help="What ib_read_bw printed.")
@click.option(
    "--sparse",
    type=_FILE,
    multiple=True,
    help="What `emu bench --json` printed, with two or more values of --top-k.",
)
@click.option("--case", default="cxl", show_default=True, help="Case of `emu bench` to take.")
@click.option(
    "--base",
    default="cxl-switch",
    show_default=True,
    help="Media profile for what was not measured.",
)
@click.option("--source", default="measured by the user", show_default=True, help="Of the numbers.")
@click.option("--date", help="When they were measured [default: today].")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The .toml file to write."
)
@click.option("--dry-run", is_flag=True, help="Print the profile, write nothing.")
@json_option
def command(**options: Any) -> None:
    """Make a media profile, with intervals, from Intel MLC, perftest or emu's own benchmark."""
    from emu.calibrate.profile import media_profile
    from emu.timing.profile_file import load_media

    out: Path = options["out"]
    if out.suffix != ".toml":
        raise UserError(f"--out {out}: a profile is a .toml file", remedy=f"give {out}.toml")
    measured = _measured(options)
    date = options["date"] or calendar_date.today().isoformat()
    text = media_profile(out.stem, options["base"], measured, options["source"], date)
    if options["dry_run"]:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror}", remedy="name another file"
        ) from error
    load_media(str(out))
    if options["as_json"]:
        print_json({"profile": str(out), "measured": [asdict(m) for m in measured]})
        return
    rows = [(m.field, f"{m.value:.6g}", f"{m.low:.6g} .. {m.high:.6g}", m.how) for m in measured]
    print_table(("figure", "value", "interval", "measured by"), rows)
    click.echo(f'written: {out}; use it as media = "{out}" in a system profile')


def _measured(options: dict[str, Any]) -> list[Measured]:
    from emu.calibrate import measured

    found: list[Measured] = []
    for path in options["mlc"]:
        found += measured.read_mlc(path, options["from_node"], options["node"])
    for path in options["ib_read_lat"]:
        found += measured.read_perftest_latency(path)
    for path in options["ib_read_bw"]:
        found += measured.read_perftest_bandwidth(path)
    if options["sparse"]:
        found += measured.read_sparse(list(options["sparse"]), options["case"])
    if not found:
        raise UserError(
            "no measurement given", remedy="give --mlc, --ib-read-lat, --ib-read-bw or --sparse"
        )
    return found
