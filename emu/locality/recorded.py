"""Recorded index streams: the format, and recorders for emu's own model and for transformers' DSA modules.

Format (npz, one request a file): `tokens` int32 [layers, steps, top_k], -1 pads; `context` int64 [], rows that the
first step sees (its newest row is context - 1); `layers` int64 [layers], the model layers that the streams are of.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from emu.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from emu.store import TokenIds


@dataclass(frozen=True, slots=True)
class Recording:
    """What one request selected.

    Attributes:
        tokens: int32 [layers, steps, top_k].
        context: rows that the first step sees.
        layers: the model layers, int64 [layers].
    """

    tokens: TokenIds
    context: int
    layers: NDArray[np.int64]

    def write(self, path: Path) -> None:
        """Write the npz file.

        Raises:
            UserError: it cannot be written.
        """
        try:
            with path.open("wb") as file:
                np.savez_compressed(
                    file, tokens=self.tokens, context=np.int64(self.context), layers=self.layers
                )
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror}", remedy="name another file"
            ) from error

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file.

        Raises:
            UserError: it cannot be read, or is no recording; says what is wrong.
        """
        try:
            # Opened here: numpy leaves a file that is no zip open when it raises.
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                tokens, context, layers = (file[name] for name in ("tokens", "context", "layers"))
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{path}: not a recording of index streams: {error}",
                remedy="give an npz with tokens [layers, steps, top_k], context and layers",
            ) from error
        recording = cls(tokens, int(context) if context.shape == () else -1, layers)
        recording.check(str(path))
        return recording

    def check(self, where: str) -> None:
        """Refuse arrays that are no index streams.

        Raises:
            UserError: says which and why.
        """
        tokens, layers = self.tokens, self.layers
        wrong = ""
        if tokens.dtype != np.int32 or tokens.ndim != 3 or 0 in tokens.shape:
            wrong = f"tokens is {tokens.dtype} {list(tokens.shape)}, wanted int32 [layers, steps, top_k]"
        elif layers.shape != (tokens.shape[0],):
            wrong = f"layers has shape {list(layers.shape)}, wanted [{tokens.shape[0]}]"
        elif self.context < 1:
            wrong = f"context is {self.context}"
        else:
            newest = self.context + np.arange(tokens.shape[1]) - 1
            ordered = np.sort(tokens, axis=2)
            same = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
            if (tokens < -1).any() or (tokens > newest[None, :, None]).any():
                wrong = "a token is below -1, or newer than its step's newest"
            elif same.any():
                wrong = "a step selects a token twice"
        if wrong:
            raise UserError(
                f"{where}: {wrong}", remedy="see the format in emu/locality/recorded.py"
            )


class Recorder:
    """Collects selections as they happen; give its `observe` to emu.sac.context.DecodeContext."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, list[TokenIds]]] = {}
        self._context: dict[int, int] = {}

    def observe(self, request: int, layer: int, length: int, tokens: TokenIds) -> None:
        """One step of one layer of a request selected tokens, int32 [k], of `length` rows."""
        self._context.setdefault(request, length)
        self._steps.setdefault(request, {}).setdefault(layer, []).append(tokens.copy())

    def recordings(self) -> dict[int, Recording]:
        """What each request selected; steps that selected fewer tokens than others are padded with -1."""
        return {
            request: Recording(
                _stacked([steps for _, steps in sorted(layers.items())]),
                self._context[request],
                np.array(sorted(layers), np.int64),
            )
            for request, layers in self._steps.items()
        }


def _stacked(layers: list[list[TokenIds]]) -> TokenIds:
    """int32 [layers, steps, k] of the layers' steps."""
    widest = max(len(tokens) for steps in layers for tokens in steps)
    out = np.full((len(layers), max(map(len, layers)), widest), -1, np.int32)
    for layer, steps in enumerate(layers):
        for step, tokens in enumerate(steps):
            out[layer, step, : len(tokens)] = tokens
    return out


def watch_transformers(model: Any, recorder: Recorder, request: int = 0) -> list[Any]:
    """Record the selections of a transformers DSA model (deepseek_v32, glm_moe_dsa) while it decodes one request.

    Every module whose class name ends with "Indexer" and that gives token indices is watched; only forward passes of
    one new token count. Call `.remove()` on each handle that is returned to stop.

    Args:
        model: the transformers model, batch 1.
        recorder: takes the selections.
        request: number to file them under.

    Raises:
        UserError: the model has no such module.
    """
    handles = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Indexer"):
            handles.append(
                module.register_forward_hook(_hook(recorder, request, _layer_number(name)))
            )
    if not handles:
        raise UserError(
            "the model has no Indexer module",
            remedy="use deepseek_v32 or glm_moe_dsa of transformers",
        )
    return handles


def _layer_number(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if not numbers:
        raise UserError(f"indexer {name!r} is in no numbered layer")
    return numbers[0]


def _hook(recorder: Recorder, request: int, layer: int) -> Any:
    seen = 0

    def hook(_module: object, _inputs: object, output: Any) -> None:
        nonlocal seen
        indices = output[0] if isinstance(output, tuple) else output
        steps = indices.detach().cpu().numpy().astype(np.int32).reshape(-1, indices.shape[-1])
        seen += steps.shape[0]
        if steps.shape[0] == 1:
            recorder.observe(request, layer, seen, steps[0])

    return hook
