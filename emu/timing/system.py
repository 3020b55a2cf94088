"""A system at work: the instances of its links and the paths between a GPU and a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.errors import UserError
from emu.suggest import unknown
from emu.timing.profile_file import DEFAULT_SYSTEM, load_system

if TYPE_CHECKING:
    from emu.timing.profile import ComputeModel, LinkModel, PathSpec, SystemProfile


@dataclass(frozen=True, slots=True)
class Path:
    """What one kind of operation crosses between one GPU and one device.

    Attributes:
        number: of the path within its system.
        name: for instance "pool_read.cxl".
        gpu, device: the ends.
        links: numbers of the links, in order.
        one_message: for each link, whether an operation is one request to it, however many rows it moves.
        write: whether the links' write bandwidth counts.
        setup_ns: fixed cost of an operation.
        parallelism: outstanding requests.
    """

    number: int
    name: str
    gpu: int
    device: int
    links: tuple[int, ...]
    one_message: tuple[bool, ...]
    write: bool
    setup_ns: float
    parallelism: int


class System:
    """The links of a system profile, as many as there are GPUs, sockets and devices.

    Attributes:
        profile: the profile.
        gpus, sockets, devices: how many there are.
        link_names: "adapter[1]" for instance 1 of the link "adapter"; "switch" where there is only one.
        link_models: their numbers, in the same order.
        paths: every path asked for so far, by number.
    """

    def __init__(
        self,
        profile: SystemProfile,
        *,
        gpus: int | None = None,
        devices: int | None = None,
        servers: int = 1,
    ) -> None:
        self.profile = profile
        self.gpus = _at_least_one("GPUs", gpus, profile.gpus.value)
        self.sockets = int(profile.sockets.value) * _at_least_one("servers", servers, 1)
        self.devices = _at_least_one("devices", devices, profile.devices.value)
        self.link_names: list[str] = []
        self.paths: list[Path] = []
        self.link_models: list[LinkModel] = []
        self._first: dict[str, int] = {}
        self._known: dict[tuple[str, int, int], Path] = {}
        counts = {"gpu": self.gpus, "socket": self.sockets, "device": self.devices, "system": 1}
        for link in profile.links.values():
            self._first[link.name] = len(self.link_models)
            for instance in range(counts[link.per]):
                self.link_models.append(link.model)
                self.link_names.append(
                    link.name if link.per == "system" else f"{link.name}[{instance}]"
                )

    @classmethod
    def load(
        cls,
        name_or_path: str = DEFAULT_SYSTEM,
        *,
        gpus: int | None = None,
        devices: int | None = None,
        servers: int = 1,
    ) -> System:
        """The system of a profile; gpus (over all servers) and devices replace the profile's counts.

        Several servers have their own sockets and share the devices and whatever there is one of per system.

        Raises:
            UserError: no such profile, one that is not right, or a count below 1.
        """
        return cls(load_system(name_or_path), gpus=gpus, devices=devices, servers=servers)

    @property
    def name(self) -> str:
        """The profile's name."""
        return self.profile.name

    @property
    def compute(self) -> ComputeModel:
        """How long the accelerator computes."""
        return self.profile.compute

    def path(self, name: str, gpu: int = 0, device: int = 0) -> Path:
        """The path of an operation between a GPU and a device; the same object every time.

        Raises:
            UserError: no such path, GPU or device.
        """
        path = self._known.get((name, gpu, device))
        if path is None:
            path = self._new_path(name, gpu, device)
            self.paths.append(path)
            self._known[name, gpu, device] = path
        return path

    def engine(self) -> _native.TimeEngine:
        """A time engine with the system's links, idle and without paths."""
        engine = _native.TimeEngine()
        for model in self.link_models:
            engine.add_link(*model.native())
        return engine

    def add_paths(self, engine: _native.TimeEngine, first: int) -> int:
        """Tell an engine of the paths from number `first` on; returns how many paths it knows then."""
        for path in self.paths[first:]:
            engine.add_path(
                np.array(path.links, np.int32),
                np.array(path.one_message, np.bool_),
                path.write,
                path.setup_ns,
                path.parallelism,
            )
        return len(self.paths)

    def _new_path(self, name: str, gpu: int, device: int) -> Path:
        spec = self.profile.paths.get(name)
        if spec is None:
            raise unknown(f"path in profile {self.name}:", name, self.profile.paths)
        for what, index, count in (("GPU", gpu, self.gpus), ("device", device, self.devices)):
            if not 0 <= index < count:
                raise UserError(
                    f"{what} {index} of {count}", remedy=f"{what}s are numbered 0 to {count - 1}"
                )
        links = tuple(self._instance(link, gpu, device) for link in spec.links)
        models = [self.link_models[link] for link in links]
        return Path(
            number=len(self.paths),
            name=name,
            gpu=gpu,
            device=device,
            links=links,
            one_message=tuple(link in spec.message_links for link in spec.links),
            write=spec.write,
            setup_ns=_setup_ns(spec, models),
            parallelism=_parallelism(spec, models),
        )

    def _instance(self, link: str, gpu: int, device: int) -> int:
        socket = gpu * self.sockets // self.gpus
        index = {"gpu": gpu, "socket": socket, "device": device, "system": 0}
        return self._first[link] + index[self.profile.links[link].per]


def _at_least_one(what: str, asked: int | None, default: float) -> int:
    count = int(default) if asked is None else asked
    if count < 1:
        raise UserError(f"{count} {what}", remedy="give 1 or more")
    return count


def _setup_ns(spec: PathSpec, models: list[LinkModel]) -> float:
    if spec.setup_ns is not None:
        return spec.setup_ns.value
    return sum(model.setup_ns.value for model in models)


def _parallelism(spec: PathSpec, models: list[LinkModel]) -> int:
    if spec.parallelism is not None:
        return int(spec.parallelism.value)
    return int(min((model.parallelism.value for model in models), default=1))
