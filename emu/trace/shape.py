"""Cutting a trace to what a run can hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.trace.request import MAX_TOKENS, Request, blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterable


def shape(
    requests: Iterable[Request],
    *,
    context: int | None = None,
    output_tokens: int | None = None,
    limit: int | None = None,
) -> list[Request]:
    """The first requests, with outputs set and prompts cut so that they fit the context.

    Args:
        requests: a trace's requests.
        context: the most tokens that prompt and output may have together; a prompt that is too long keeps its
            head, so shared prefixes stay shared.
        output_tokens: what every request generates, instead of its own figure.
        limit: at most so many requests.

    Returns:
        New requests in the same order, each with at least one prompt token.

    Raises:
        UserError: a figure below 1, or a context without room for a request's output and one prompt token.
    """
    for name, value in (("context", context), ("output tokens", output_tokens), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{name}: {value} is less than 1", remedy="give at least 1")
    if output_tokens is not None and output_tokens > MAX_TOKENS:
        raise UserError(
            f"output tokens: {output_tokens} is more than {MAX_TOKENS}", remedy="give fewer"
        )
    shaped: list[Request] = []
    for request in requests:
        if limit is not None and len(shaped) >= limit:
            break
        shaped.append(_fit(request, context, output_tokens))
    return shaped


def fit_outputs(requests: Iterable[Request], context: int) -> list[Request]:
    """Outputs cut so that two prompt tokens fit beside them: one to cache, and the first input of decode."""
    return [replace(r, output_tokens=min(r.output_tokens, context - 2)) for r in requests]


def _fit(request: Request, context: int | None, output_tokens: int | None) -> Request:
    output = request.output_tokens if output_tokens is None else output_tokens
    room = request.input_tokens if context is None else context - output
    if room < 1:
        raise UserError(
            f"request {request.id}: {output} output tokens leave no room for a prompt in a context of {context}",
            remedy="give a larger --context or fewer --output-tokens",
        )
    tokens = min(request.input_tokens, room)
    return replace(
        request,
        input_tokens=tokens,
        output_tokens=output,
        hash_ids=request.hash_ids[: blocks_of(tokens)],
    )
