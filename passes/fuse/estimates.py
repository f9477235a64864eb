"""Seconds and workspace of groups that are not written yet; of groups that are alike they are counted once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import fx

from roamc.cost import group_seconds, group_workspace, load_profile, seconds
from roamc.cost.profile import DeviceProfile
from roamc.graph import main_device
from roamc.operators import blocks
from roamc.operators.alike import Alike
from roamc.operators.fused import Fused, fuse
from roamc.options import Options
from roamc.passes.fuse.write import Site
from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Estimates:
    """What the groups of a graph take, on one device.

    Attributes:
        kind: how groups run on the device.
        profile: of the device.
        threads: of torch on a CPU.
        alike: says which groups are alike.
    """

    kind: type[Fused]
    profile: DeviceProfile
    threads: int
    alike: Alike
    _groups: dict[Hashable, Fused] = field(default_factory=dict)
    _seconds: dict[Hashable, Seconds] = field(default_factory=dict)
    _workspaces: dict[Hashable, Bytes] = field(default_factory=dict)
    _operators: dict[Hashable, Seconds] = field(default_factory=dict)

    @staticmethod
    def of(site: Site, options: Options) -> Estimates:
        """Estimates for the groups of a graph, by the device profile ``options.profile``."""
        profile = load_profile(main_device(site.graph), options.profile)
        return Estimates(site.kind, profile, site.graph.threads, site.alike)

    def operator_seconds(self, node: fx.Node) -> Seconds:
        """Predict the seconds of an operator alone."""
        key = self.alike.key((node,))
        if key not in self._operators:
            self._operators[key] = seconds(node, self.profile)
        return self._operators[key]

    def group_seconds(self, members: Sequence[fx.Node], results: Sequence[fx.Node]) -> Seconds:
        """Predict the seconds of a group of ``members``, views between them included, that has ``results``."""
        key = self.alike.key(members, results)
        if key not in self._seconds:
            self._seconds[key] = group_seconds(self.group(members, results), self.profile)
        return self._seconds[key]

    def group_workspace(self, members: Sequence[fx.Node], results: Sequence[fx.Node]) -> Bytes:
        """Predict the bytes that a group takes for itself while it runs, for members and results as above."""
        key = self.alike.key(members, results)
        if key not in self._workspaces:
            self._workspaces[key] = group_workspace(self.group(members, results), self.threads)
        return self._workspaces[key]

    def group(self, members: Sequence[fx.Node], results: Sequence[fx.Node]) -> Fused:
        """Return a group that differs from that of ``members`` and ``results`` in names alone."""
        key = self.alike.key(members, results)
        if key not in self._groups:
            self._groups[key], _ = fuse(blocks.last_of(members), members, self.kind, results)
        return self._groups[key]
