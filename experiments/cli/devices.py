"""Error messages for programs that end because JAX lacks the devices that they are set to use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import jax
from jax.extend.backend import backends

from ddiloco.config import ConfigError
from ddiloco.telemetry.records import reason

_VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")


class DeviceError(Exception):
    """JAX starts no platform, though none is set; the message is one line."""


def cause(error: BaseException) -> ConfigError | DeviceError | None:
    """Which devices are missing, if that is why the error was raised; None: it is another.

    JAX is of no more use to this process then.
    """
    for platform in (None, "cpu"):
        try:
            jax.devices(platform)
        except Exception as again:
            if any(_same(one, again) for one in _chain(error)):
                return _explained(again, platform)
    return None


def _explained(error: Exception, platform: str | None) -> ConfigError | DeviceError:
    """The line for an error of JAX's as it looks for the devices of a platform; None: of the default."""
    values = jax.config.values
    name = next((name for name in _VARIABLES if values.get(name.lower())), None)
    value = name and values[name.lower()]
    if platform is not None and name is not None:
        must = f"must name {platform} too, where fragments are merged: {value},{platform}"
        return ConfigError(f"{name}: is {value!r}, but {must}")
    why = f" ({reason(error).partition(' (set JAX_PLATFORMS')[0]})" if str(error) else ""
    if name is None:
        return DeviceError(f"JAX finds no devices{why}")
    found = ", ".join(_available_platforms()) or "none"
    return ConfigError(f"{name}: is {value!r}, but the platforms that JAX finds here are: {found}{why}")


def _same(one: BaseException, other: BaseException) -> bool:
    """Whether JAX has raised the same twice; its own frames do not count, since it may remove them."""
    return type(one) is type(other) and str(one) == str(other)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it follows from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _available_platforms() -> list[str]:
    """Those that JAX finds where none is set."""
    logging.getLogger(backends.__module__).setLevel(logging.ERROR)  # it would recommend packages
    for name in _VARIABLES:
        jax.config.update(name.lower(), "")
    with contextlib.suppress(Exception):
        return sorted(backends())
    return []
