"""Folders on other machines, or object stores, as fsspec names them."""

from __future__ import annotations

from typing import Any

from slipstream.errors import UserError


def open_store(url: str, setting: str) -> tuple[Any, str]:
    """File system and path of a place; nothing is remembered of earlier looks at it.

    Args:
        url: A path, or `scheme://…`.
        setting: Where it was given, for the message.

    Raises:
        UserError: An unknown scheme, or a scheme whose package is not installed.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except (ValueError, ImportError) as error:
        raise UserError(f"{setting} {url!r} cannot be used: {error}", "see fsspec's list of schemes") from None
    return system, str(path).rstrip("/")
