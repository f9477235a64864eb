"""The version of roamc, and the versions of torch that it is tested with."""

import warnings

from roamc.errors import users_level

__version__ = "0.1.0"

TESTED_TORCH = ((2, 11), (2, 14))
"""Oldest and newest release of torch, as (major, minor), that the tests run with."""


def warn_of_untested_torch(installed: str) -> None:
    """Warn if ``installed``, a version of torch such as ``"2.15.0+cpu"``, is newer than what roamc is tested with.

    Graphs, operators and private interfaces of a newer torch may differ; what roamc cannot plan falls back as ever.
    """
    oldest, newest = (".".join(map(str, release)) for release in TESTED_TORCH)
    major, minor = (int(part) for part in installed.split(".")[:2])
    if (major, minor) > TESTED_TORCH[1]:
        warnings.warn(
            f"roamc {__version__} is tested with torch {oldest} to {newest}, and this is torch {installed}: "
            f"look for a newer roamc, or install torch {newest}",
            stacklevel=users_level(),
        )
