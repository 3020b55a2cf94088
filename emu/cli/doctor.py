"""`emu doctor`: what this machine can do, what is missing, and what that costs."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from emu.cli.common import json_option, print_json, print_table, progress


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
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(f.capability, "ok" if f.ok else "missing", f.reason) for f in findings]
        print_table(("capability", "", "seen"), rows)
        for finding in findings:
            if not finding.ok:
                click.echo(f"{finding.capability}: costs: {finding.cost}; remedy: {finding.remedy}")
    missing = [f.capability for f in findings if f.capability in needed and not f.ok]
    if missing:
        click.echo(
            f"emu: needed but missing: {', '.join(missing)} (see the remedies above)", err=True
        )
        sys.exit(1)
