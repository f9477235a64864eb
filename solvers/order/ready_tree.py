"""The operators that may run next, searchable by how much they need and how much they leave behind."""

from roamc.solvers.order.problem import Bytes, OpIndex

_ABSENT = 1 << 127


class ReadyTree:
    """A segment tree over operators. A leaf holds two numbers of bytes: what an operator adds while it runs
    (need) and what it leaves when it has run (net, negative if it frees more than it allocates).

    Leaves stand in the sequence of the needs given at the start. While needs do not change, the operators
    that fit into some slack are therefore a prefix of the leaves and every call costs O(log n). Needs may
    fall; then a search may have to look at more leaves, but it still never enters a subtree in which nothing
    fits or nothing is better.

    Both numbers are stored as number * n + operator, so that ties go to the lower operator and one comparison
    does it.
    """

    def __init__(self, first_needs: list[Bytes]) -> None:
        """first_needs[v]: bytes needed by operator v now; no operator is ready yet."""
        self._num_ops = len(first_needs)
        self._width = 1 << max(self._num_ops - 1, 0).bit_length()
        self._leaf = [0] * self._num_ops
        for place, op in enumerate(sorted(range(self._num_ops), key=first_needs.__getitem__)):
            self._leaf[op] = self._width + place
        self._need = [_ABSENT] * (2 * self._width)
        self._net = [_ABSENT] * (2 * self._width)

    def put(self, op: OpIndex, need: Bytes, net: Bytes) -> None:
        """Make `op` ready, or change its numbers if it is ready. O(log n)."""
        self._set(self._leaf[op], need * self._num_ops + op, net * self._num_ops + op)

    def remove(self, op: OpIndex) -> None:
        """`op` is no longer ready. O(log n)."""
        self._set(self._leaf[op], _ABSENT, _ABSENT)

    def best(self, slack: Bytes) -> OpIndex:
        """Of the ready operators that need at most `slack` the one with the lowest net, else the lowest need.

        Ties go to the lower operator. At least one operator must be ready.
        """
        needs, nets, width = self._need, self._net, self._width
        limit = (slack + 1) * self._num_ops
        found = _ABSENT
        pending = [1]
        while pending:
            node = pending.pop()
            if needs[node] >= limit or nets[node] >= found:
                continue
            if node >= width:
                found = nets[node]
            elif nets[2 * node] < nets[2 * node + 1]:
                pending.append(2 * node + 1)
                pending.append(2 * node)
            else:
                pending.append(2 * node)
                pending.append(2 * node + 1)
        return (needs[1] if found == _ABSENT else found) % self._num_ops

    def _set(self, node: int, need: int, net: int) -> None:
        needs, nets = self._need, self._net
        needs[node] = need
        nets[node] = net
        node >>= 1
        while node:
            left = 2 * node
            need = min(needs[left], needs[left + 1])
            net = min(nets[left], nets[left + 1])
            if needs[node] == need and nets[node] == net:
                return
            needs[node] = need
            nets[node] = net
            node >>= 1
