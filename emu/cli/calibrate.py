"""`emu calibrate`: a media profile from measurements."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date as calendar_date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, print_table
from emu.errors import UserError
from emu.text_file import refusing

if TYPE_CHECKING:
    from emu.calibrate.measured import Measured

_FILE = click.Path(path_type=Path)
_MEND = "measure again, or mend the row"


@click.command("calibrate")
@click.option(
    "--mlc",
    type=_FILE,
    multiple=True,
    help="What Intel MLC printed; of several runs for an interval.",
)
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
    help="Media profile for what was not measured [default: rdma-100g for perftest, else cxl-switch].",
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
    from emu.timing.profile_file import DEFAULT_SYSTEM

    out: Path = options["out"]
    if out.suffix != ".toml":
        raise UserError(f"--out {out}: a profile is a .toml file", remedy=f"give {out}.toml")
    verbs = bool(options["ib_read_lat"] or options["ib_read_bw"])
    if verbs and (options["mlc"] or options["sparse"]):
        raise UserError(
            "perftest measures a NIC, MLC and emu bench measure memory: one profile is of one medium",
            remedy="make a profile of each",
        )
    options["base"] = options["base"] or ("rdma-100g" if verbs else "cxl-switch")
    measured = _measured(options)
    date = options["date"] or calendar_date.today().isoformat()
    text = media_profile(out.stem, options["base"], measured, options["source"], date)
    if options["dry_run"]:
        click.echo(text, nl=False)
        return
    _write(out, text)
    if options["as_json"]:
        print_json({"profile": str(out), "measured": [asdict(m) for m in measured]})
        return
    rows = [(m.field, f"{m.value:.6g}", f"{m.low:.6g} .. {m.high:.6g}", m.how) for m in measured]
    print_table(("figure", "value", "interval", "measured by"), rows)
    click.echo(f"written: {out}; a system profile that uses it, for `emu sim --profile FILE`:")
    link = "nic" if verbs else "cxl_device"
    click.echo(f'  base = "{DEFAULT_SYSTEM}"\n  [link.{link}]\n  media = "{out.resolve()}"')
    click.echo(
        "a path adds up the latencies of its links: take off what the other links of it count"
    )


def _write(out: Path, text: str) -> None:
    """Put the profile in place once emu has loaded it: what it refuses replaces nothing."""
    from emu.timing.profile_file import load_media

    new = out.with_name(f".{out.stem}.new.toml")
    try:
        new.write_text(text, encoding="utf-8")
        load_media(str(new))
        new.replace(out)
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror}", remedy="name another file"
        ) from error
    finally:
        new.unlink(missing_ok=True)


def _measured(options: dict[str, Any]) -> list[Measured]:
    from emu.calibrate import measured

    def read_mlc(path: Path) -> list[Measured]:
        return measured.read_mlc(path, options["from_node"], options["node"])

    readers = (
        ("mlc", read_mlc),
        ("ib_read_lat", measured.read_perftest_latency),
        ("ib_read_bw", measured.read_perftest_bandwidth),
    )
    found: list[Measured] = []
    for option, read in readers:
        for path in options[option]:
            with refusing(f"{path}: damaged", _MEND):
                found += read(path)
    if options["sparse"]:
        with refusing(f"{', '.join(map(str, options['sparse']))}: damaged", _MEND):
            found += measured.read_sparse(list(options["sparse"]), options["case"])
    if not found:
        raise UserError(
            "no measurement given", remedy="give --mlc, --ib-read-lat, --ib-read-bw or --sparse"
        )
    return found
