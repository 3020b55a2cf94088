"""Reading profiles: TOML files in which every number has a source.

A number is written `{ value = 750, source = "...", date = "2025-11", note = "..." }`; one without a source is
refused. `base = "name"` starts from another system profile and replaces what is given; a link that names another
`media` takes all of its numbers, and none of the base's. Files that a profile names lie where it lies.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from emu.errors import UserError
from emu.suggest import unknown
from emu.timing.profile import (
    ComputeModel,
    Figure,
    LinkModel,
    LinkSpec,
    MediaProfile,
    PathSpec,
    SystemProfile,
)
from emu.toml_file import read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PROFILES = Path(__file__).parent / "profiles"
MEDIA_ALIASES = {"cxl-switch": "cxl-switch-beluga"}
DEFAULT_SYSTEM = "sac-server"
INSTANCES = ("gpu", "socket", "device", "system")
_SYSTEM_KEYS = ("description", "gpus", "sockets", "devices", "link", "path", "compute")
_FIGURE_KEYS = ("value", "source", "date", "note")


def media_names() -> list[str]:
    """Names of the media profiles that come with emu, aliases included."""
    return sorted({file.stem for file in (PROFILES / "media").glob("*.toml")} | set(MEDIA_ALIASES))


def system_names() -> list[str]:
    """Names of the system profiles that come with emu."""
    return sorted(file.stem for file in (PROFILES / "system").glob("*.toml"))


def load_media(name: str) -> MediaProfile:
    """The media profile of a name or of a .toml file.

    Raises:
        UserError: no such profile, or one that is not right.
    """
    name = MEDIA_ALIASES.get(name, name)
    file = _file(name, "media", media_names())
    table = read_toml(file, "profile")
    _refuse_unknown(table, ("description", *_field_names(LinkModel)), str(file))
    return MediaProfile(file.stem, _text(table, "description", str(file)), _link_model(table, file))


def load_system(name: str = DEFAULT_SYSTEM) -> SystemProfile:
    """The system profile of a name or of a .toml file.

    Raises:
        UserError: no such profile, or one that is not right.
    """
    file = _file(name, "system", system_names())
    raw = read_toml(file, "profile")
    where = str(file)
    if _is_medium(raw):
        raise UserError(
            f"{where} is a medium, not a system",
            remedy=f'write a system profile: base = "{DEFAULT_SYSTEM}", [link.cxl_device] or another link, media = "{name}"',
        )
    lacking = [key for key in _SYSTEM_KEYS if key not in raw]
    if lacking and "base" not in raw:
        raise UserError(
            f"{where} lacks {', '.join(lacking)}",
            remedy=f'to change a profile that is there, write base = "{DEFAULT_SYSTEM}" at the top',
        )
    table = _with_base(raw, file, ())
    _refuse_unknown(table, _SYSTEM_KEYS, where)
    links = {key: _link_spec(key, value, file) for key, value in _tables(table, "link", where)}
    compute = _table(table, "compute", where)
    _refuse_unknown(compute, _field_names(ComputeModel), f"{where} [compute]")
    return SystemProfile(
        name=file.stem,
        description=_text(table, "description", where),
        gpus=_count(table, "gpus", where),
        sockets=_count(table, "sockets", where),
        devices=_count(table, "devices", where),
        links=links,
        paths={
            key: _path_spec(key, value, links, where)
            for key, value in _tables(table, "path", where)
        },
        compute=ComputeModel(
            **{
                key: _figure(compute, key, f"{where} [compute]")
                for key in _field_names(ComputeModel)
            }
        ),
    )


def _is_medium(table: dict[str, Any]) -> bool:
    return "latency_ns" in table and "link" not in table and "base" not in table


def _file(name: str, kind: str, names: list[str], folder: Path | None = None) -> Path:
    """The file of a profile; folder is where a file that a profile names lies."""
    if name.endswith(".toml"):
        return Path(name) if folder is None else folder / name
    if name not in names:
        raise unknown(f"{kind} profile", name, names)
    return PROFILES / kind / f"{name}.toml"


def _with_base(table: dict[str, Any], file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    _name_media(table, file)
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str) or file in seen:
        raise UserError(f"{file}: base {base!r} is no other profile", remedy="name a profile")
    base_file = _file(base, "system", system_names(), file.parent)
    return _merged(_with_base(read_toml(base_file, "profile"), base_file, (*seen, file)), table)


def _name_media(table: dict[str, Any], file: Path) -> None:
    """Media files by where they lie: what is merged does not know which profile named them."""
    for link in table["link"].values() if isinstance(table.get("link"), dict) else ():
        media = link.get("media") if isinstance(link, dict) else None
        if isinstance(media, str) and media.endswith(".toml"):
            link["media"] = str(file.parent / media)


def _merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    # A link of another medium takes that one's numbers: of the base's it keeps how many there are of it.
    out = {key: base[key] for key in base if key == "per"} if "media" in change else dict(base)
    for key, value in change.items():
        old = out.get(key)
        out[key] = _merged(old, value) if _is_section(old) and _is_section(value) else value
    return out


def _is_section(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and "value" not in value  # a number is replaced whole


def _field_names(cls: type[LinkModel | ComputeModel]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


def _refuse_unknown(table: dict[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            raise unknown(f"{where}: key", key, known)


def _table(table: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = table.get(key)
    if not isinstance(value, dict):
        raise UserError(f"{where}: no table [{key}]", remedy=f"add [{key}], or base = a profile")
    return value


def _tables(table: dict[str, Any], key: str, where: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, _table(table[key], name, where)) for name in _table(table, key, where)]


def _text(table: dict[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {key} is missing or empty", remedy="write some text there")
    return value


def _figure(table: dict[str, Any], key: str, where: str) -> Figure:
    remedy = f'write {key} = {{ value = 1, source = "where from", date = "when" }}'
    raw = table.get(key)
    if not isinstance(raw, dict):
        raise UserError(f"{where}: {key} is not a number with a source", remedy=remedy)
    _refuse_unknown(raw, _FIGURE_KEYS, f"{where}: {key}")
    value = raw.get("value")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type,operator]
        raise UserError(f"{where}: {key}: value {value!r} is not a number >= 0", remedy=remedy)
    for text in ("source", "date"):
        if not isinstance(raw.get(text), str) or not raw[text].strip():
            raise UserError(f"{where}: {key} has no {text}", remedy=remedy)
    return Figure(value, raw["source"], raw["date"], str(raw.get("note", "")))  # type: ignore[arg-type]


def _count(table: dict[str, Any], key: str, where: str) -> Figure:
    figure = _figure(table, key, where)
    if figure.value < 1 or figure.value != int(figure.value):
        raise UserError(f"{where}: {key} is {figure.value}", remedy="give a whole number >= 1")
    return figure


def _link_model(table: dict[str, Any], file: Path) -> LinkModel:
    where = str(file)
    figures = {key: _figure(table, key, where) for key in _field_names(LinkModel)}
    for key, figure in figures.items():
        least, most = (1e-6, 1e6) if key.endswith("gb_per_s") else (0, 1e12)
        if not least <= figure.value <= most:
            raise UserError(
                f"{where}: {key} is {figure.value:g}", remedy=f"give {least:g} to {most:g}"
            )
    _count(table, "parallelism", where)
    return LinkModel(**figures)


def _link_spec(name: str, table: dict[str, Any], file: Path) -> LinkSpec:
    where = f"{file} [link.{name}]"
    _refuse_unknown(table, ("media", "per", *_field_names(LinkModel)), where)
    per = table.get("per")
    if per is None:
        raise UserError(
            f"{where}: per is missing: no profile that it starts from has this link",
            remedy=f"write per = one of {', '.join(INSTANCES)}, or name a link of the base",
        )
    if per not in INSTANCES:
        raise unknown(f"{where}: per =", str(per), INSTANCES)
    media = load_media(_text(table, "media", where)).model
    full: dict[str, Any] = {
        key: table.get(key, _as_table(getattr(media, key))) for key in _field_names(LinkModel)
    }
    return LinkSpec(name, per, _link_model(full, file))


def _as_table(figure: Figure) -> dict[str, Any]:
    return {key: getattr(figure, key) for key in _FIGURE_KEYS}


def _path_spec(
    name: str, table: dict[str, Any], links: Mapping[str, LinkSpec], where: str
) -> PathSpec:
    where = f"{where} [path.{name}]"
    _refuse_unknown(table, ("links", "write", "message_links", "setup_ns", "parallelism"), where)
    names, messages = table.get("links"), table.get("message_links", [])
    for link in [*_list(names, "links", where), *_list(messages, "message_links", where)]:
        if link not in links:
            raise unknown(f"{where}: link", str(link), links)
    write = table.get("write", False)
    if not isinstance(write, bool):
        raise UserError(f"{where}: write is {write!r}", remedy="write true or false")
    return PathSpec(
        name=name,
        links=tuple(_list(names, "links", where)),
        write=write,
        message_links=frozenset(_list(messages, "message_links", where)),
        setup_ns=_figure(table, "setup_ns", where) if "setup_ns" in table else None,
        parallelism=_count(table, "parallelism", where) if "parallelism" in table else None,
    )


def _list(value: object, key: str, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(f"{where}: {key} is not a list of names", remedy='write ["a", "b"]')
    return value


def profile_figures(name: str) -> dict[str, Figure]:
    """Every number of a system or media profile, by its place: "link.nic.latency_ns".

    Raises:
        UserError: no such profile, or one that is not right.
    """
    if name in media_names():
        return dict(_figures_in(load_media(name).model, ""))
    if not name.endswith(".toml") and name not in system_names():
        raise unknown("profile", name, [*system_names(), *media_names()])
    if name.endswith(".toml") and _is_medium(read_toml(Path(name), "profile")):
        return dict(_figures_in(load_media(name).model, ""))
    system = load_system(name)
    parts: list[tuple[str, object]] = [("", system), ("compute.", system.compute)]
    parts += [(f"link.{link.name}.", link.model) for link in system.links.values()]
    parts += [(f"path.{path.name}.", path) for path in system.paths.values()]
    return {key: figure for prefix, part in parts for key, figure in _figures_in(part, prefix)}


def _figures_in(part: object, prefix: str) -> list[tuple[str, Figure]]:
    values = ((field.name, getattr(part, field.name)) for field in fields(part))  # type: ignore[arg-type]
    return [(f"{prefix}{key}", value) for key, value in values if isinstance(value, Figure)]
