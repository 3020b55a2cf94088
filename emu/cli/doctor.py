"""`emu doctor`: what this machine can do, what is missing, and what that costs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from emu.cli.common import json_option, print_json, print_table, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emu.probes import Finding

ESSENTIAL = ("python", "native", "cpu_flush", "shm", "memory", "torch")
"""Without these a testbed, a store or `emu run` does not work with its defaults."""


@click.command("doctor")
@click.option("--need", metavar="A,B", default="", help="Exit 1 unless these are there.")
@json_option
def command(need: str, as_json: bool) -> None:
    """Try what this machine can do; for what is missing say the cost and the remedy."""
    from emu.probes import PROBES, check_names, probe

    needed = check_names([name for name in need.replace(" ", "").split(",") if name])
    findings = []
    for name in PROBES:
        progress(name)
        findings.append(probe(name))
    if as_json:
        print_json({"findings": [{**asdict(f), "status": f.status} for f in findings]})
    else:
        rows = [(f.capability, f.status, f.reason) for f in findings]
        print_table(("capability", "", "seen"), rows)
        for finding in findings:
            if finding.status == "missing":
                click.echo(f"{finding.capability}: costs: {finding.cost}; remedy: {finding.remedy}")
        click.echo(verdict(findings))
    missing = [f.capability for f in findings if f.capability in needed and not f.ok]
    if missing:
        click.echo(
            f"emu: needed but missing: {', '.join(missing)} (see the remedies above)", err=True
        )
        sys.exit(1)


def verdict(findings: Sequence[Finding]) -> str:
    """All of it in one line."""
    missing = [f.capability for f in findings if f.status == "missing"]
    broken = [name for name in missing if name in ESSENTIAL]
    if broken:
        return f"not everything works here: {', '.join(broken)} must be mended first"
    rest = f"; {', '.join(missing)} would make it better" if missing else ""
    return f"everything works here{rest}"
