"""`emu profiles`: what can be modelled, and where each number comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, print_table

if TYPE_CHECKING:
    from emu.timing.profile import Figure


@click.command("profiles")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the profiles, or print every number of the one of that NAME (or .toml file) with its source.

    Systems are for `--profile`; media are what a system's links and store_timing() are made of.
    """
    from emu.timing.profile_file import profile_figures

    if name is not None:
        figures = profile_figures(name)
        if as_json:
            print_json({"name": name, "figures": {key: _plain(f) for key, f in figures.items()}})
        else:
            rows = [(key, f"{f.value:,.10g}", f.date, _source(f)) for key, f in figures.items()]
            print_table(("number", "value", "date", "source"), rows)
        return
    listed = _listed()
    if as_json:
        print_json({"profiles": listed})
    else:
        lines = [(p["kind"], p["name"], p["description"]) for p in listed]
        print_table(("kind", "name", "what"), lines)


def _listed() -> list[dict[str, str]]:
    from emu.timing.profile_file import (
        MEDIA_ALIASES,
        load_media,
        load_system,
        media_names,
        system_names,
    )

    systems = [("system", name, load_system(name).description) for name in system_names()]
    media = [
        ("medium", name, f"another name of {same}" if same else load_media(name).description)
        for name in media_names()
        for same in (MEDIA_ALIASES.get(name),)
    ]
    return [{"kind": kind, "name": name, "description": d} for kind, name, d in systems + media]


def _plain(figure: Figure) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(figure)


def _source(figure: Figure) -> str:
    return f"{figure.source} ({figure.note})" if figure.note else figure.source
