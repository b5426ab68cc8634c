"""What commands that ask a running server share: its client, and answers that may be a refusal, or another server's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from diptych.ground.errors import ConfigError

TIMEOUT_S = 600.0


def headers_of(key: str | None) -> dict[bytes, bytes]:
    """A key as the bytes that a shell gave: of texts httpx takes ASCII alone."""
    return {b"Authorization": b"Bearer " + os.fsencode(key)} if key else {}


@contextmanager
def client_of(url: str, key: str | None, *, hint: str) -> Iterator[httpx.Client]:
    """A client of the server at url. ConfigError with the hint where it cannot be reached, also for what is asked within."""
    try:
        with httpx.Client(base_url=url, headers=headers_of(key), timeout=TIMEOUT_S) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"cannot reach {url}: {error}", hint=hint) from error


def fields_of(answer: httpx.Response, asked: str, *names: str) -> dict[str, Any]:
    """An answer's JSON object. ConfigError for a refusal, and for one without these fields; asked: who or what was."""
    if answer.status_code != 200:
        raise refusal(answer, asked)
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(names):
        raise ConfigError(
            f"{asked} answers {answer.text[:80]!r}, which no server of Diptych says", hint="is the url right"
        )
    return found


def refusal(answer: httpx.Response, asked: str) -> ConfigError:
    """A server's refusal in its own words, where the answer has them as OpenAI's do; asked: who or what was."""
    try:
        told = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):  # another server's, or a proxy's page
        told = answer.text[:500]
    hint = "give its key with --api-key, or in DIPTYCH_API_KEY" if answer.status_code == 401 else None
    return ConfigError(f"{asked} answers {answer.status_code}: {told}", hint=hint)
