"""retain: what is kept for its later readers, whole or in a smaller form, and what is dropped and made again.

All of it under a budget in bytes of peak. Read ``choose.py`` first.
"""

from __future__ import annotations

from roamc.passes.retain.apply import apply
from roamc.passes.retain.choose import Choice
from roamc.passes.retain.compress import Code, compress
from roamc.passes.retain.decide import NOTHING, Decision, decide
from roamc.passes.retain.recompute import Rerun, rerun

__all__ = ["NAME", "NOTHING", "Choice", "Code", "Decision", "Rerun", "apply", "compress", "decide", "rerun"]

NAME = "retain"
