"""The judge of values checks that every operator reads the values that it read in the captured graph.

A graph is run once with numbers in the place of tensors. A storage has the number of what lies in it. An operator has
the number of (what it calls, its literal arguments, the numbers that it reads, for a random operator the state of the
generator); what it makes or writes has a number made of that. Two equal numbers are the same bits:

    captured                                 a rerun in the wrong place
    h  = mul(x, s)          7 = mul(1, 2)    h   = mul(x, s)          7 = mul(1, 2)
    s += 1                  s: 2 -> 8        s  += 1                  s: 2 -> 8
    dx = mm(h, g)           9 = mm(7, 3)     h_1 = mul(x, s)         10 = mul(1, 8)
                                             dx  = mm(h_1, g)        11 = mm(10, 3), and 9 is wanted

Views need no number: they are places in a storage, and a reader reads (number of the storage, place). Where a view lies
is derived anew from its operator and arguments, once for all views that are alike. A rerun has the number of its
original, also one of a collective that runs again on all ranks, a replay that of the draw that it repeats, a result
written over an argument the number that it would have in memory of its own. What a codec has decoded counts as the
value that was encoded, for readers that need no more of it than the codec keeps. A codec may read values beside
its code that an operator has made from what it decodes, and what that operator has read.

This module shares no code with the passes: which of their rewritings change operators but no values stands a second
time in :mod:`roamc.graph.same_values`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from roamc.errors import VerifyError, way_out
from roamc.graph import Phase, TrainGraph, maker_of, output_values, placeholders, update_judge
from roamc.graph.keep import is_kept
from roamc.graph.ranks import check_again
from roamc.graph.reader_kinds import ReaderKinds, position_in
from roamc.graph.same_values import OTHER_SUMS
from roamc.graph.value_messages import fail, fail_effects
from roamc.graph.value_numbers import Flow, Number, Numbers
from roamc.graph.value_walk import Walk, output_name
from roamc.operators import ops
from roamc.operators.composite import Composite
from roamc.operators.counter import draw_seeds
from roamc.operators.padded import rows_padded
from roamc.operators.schemas import name_of
from roamc.operators.table import Kind


def read(graph: TrainGraph, numbers: Numbers, after: str = "capture", walk_of: type[Walk] = Walk) -> Flow:
    """Number the values of ``graph`` in its present order: equal numbers stand for equal bits.

    Args:
        graph: the graph; stays as it is.
        numbers: gives the numbers; the same object for all graphs that are to be compared.
        after: name of the pass that left the graph, for the message.
        walk_of: runs the nodes.

    Returns:
        The numbers of its operators, effects and final values.

    Raises:
        VerifyError: a view lies in another storage than its base, or elsewhere in it than its arguments say, or cannot
            be made with these arguments. Or a codec reads something that was not made from what it decodes, or that is
            written later.
    """
    walk = walk_of(numbers, graph.encodings, graph.reuse, graph.same_plan)
    fed = list(zip(placeholders(graph.graph), graph.inputs, strict=True))
    callers = {node: port.name for node, port in fed}
    handed_in = [node for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")]
    returned = list(zip(output_values(graph.graph), graph.outputs, strict=True))
    overwritten = [node for node, port in (*fed, *returned) if port.overwritten and node is not None]
    finals: dict[str, Number] = {}
    crossed, updates = not graph.boundary, update_judge.Recorder(graph)
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            walk.feed(node, numbers.of("given", node.op, str(node.target)))
        elif node.op == "call_function":
            if not crossed and graph.phase[node.name] is not Phase.FORWARD and not ops.is_view(node.target):
                crossed = True
                early = [(value, port) for value, port in returned if port.phase is Phase.FORWARD]
                finals |= walk.results(early, "forward")
                walk.hand_over(handed_in, overwritten)
            try:
                odd = walk.call(node)
            except RuntimeError as error:  # an operator on fake tensors, such as one that makes a view
                reason = str(error).partition("\n")[0]
                raise VerifyError(f"after pass {after!r}: {node.name} cannot run on what it reads: {reason}") from None
            if odd is not None:
                raise VerifyError(f"after pass {after!r}: {node.name} is a view {odd}")
            updates.note(walk, node)
    for encoding, what in walk.strange:
        raise VerifyError(
            f"after pass {after!r}: codec {encoding.codec!r} makes {encoding.storage} from {what}; {way_out(after)}"
        )
    finals |= walk.results(returned, "step")
    for node in handed_in:
        finals |= walk.left(node, callers.get(node, node.name))
    finals["the random generator"] = walk.state
    effects = tuple(walk.effects)
    lossy = tuple(walk.lossy)
    numbered = walk.operators, effects, finals, walk.makers, walk.writers, walk.again
    return Flow(numbers, *numbered, updates.finished(), lossy)


def check(
    graph: TrainGraph,
    before: Flow,
    after: str,
    lossy: Sequence[str] = (),
    *,
    fast: bool = False,
    handed_over: bool = False,
) -> Flow:
    """Compare the values of ``graph`` with those that it had before a pass.

    Args:
        graph: what the pass left.
        before: values of the graph before the pass, as :func:`read` or :func:`check` returned them.
        after: name of the pass, for the message.
        lossy: names of the inexact codecs that are allowed.
        fast: whether products may come from a library or run with a collective, and groups run as a kernel, that sum in
            another order, and dropouts may have other masks.
        handed_over: whether to compare outputs of forward only where the caller gets them, and not again at the end of
            the step: by then the caller may have written to tensors that they are views of. Those that the graph marks
            as overwritten are never compared again.

    Returns:
        The values of ``graph``.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller gets another value: names the reader, what it
            would read and who wrote it. Or ``graph`` has an inexact codec, product or group that is not allowed, an
            operator reads what an inexact codec has decoded as a kind that the codec does not serve, what
            :func:`roamc.keep` keeps is computed again or encoded, or :func:`read` refuses it.
    """
    _check_exact(graph, after, lossy, fast)
    flow = read(graph, before.numbers, after)
    _check_kinds(graph, flow, after)
    _check_kept(graph, before, flow, after)
    early = [(at, port) for at, port in enumerate(graph.outputs) if graph.boundary and port.phase is Phase.FORWARD]
    besides = {output_name(at, port, "step") for at, port in early if handed_over or port.overwritten}
    compare(flow, before, after, besides)
    check_again(graph, flow.again - before.again, after)
    return replace(flow, updates=update_judge.check(flow.updates, before.updates, after))


def compare(flow: Flow, before: Flow, after: str, besides: Collection[str] = ()) -> None:
    """Compare the values of a graph with those that it had before a pass, as far as :func:`check` does.

    Args:
        flow: values of the graph that the pass left.
        before: values of the graph before the pass, with the same ``numbers``.
        after: name of the pass.
        besides: keys of ``finals`` that are left out.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller gets another value.
    """
    for name, number in flow.operators.items():
        if before.operators.get(name, number) != number:
            fail(flow, before, after, name, before.operators[name], number)
    if [number for number, _ in flow.effects] != [number for number, _ in before.effects]:
        fail_effects(flow, before, after)
    for key in {**before.finals, **flow.finals}:
        if key not in besides and before.finals.get(key) != flow.finals.get(key):
            fail(flow, before, after, key, before.finals.get(key), flow.finals.get(key))


def compare_by(walk: type[Walk], before: TrainGraph, after: TrainGraph, name: str) -> None:
    """Compare the values of the graphs before and behind a pass, as ``walk`` numbers them in both.

    Args:
        walk: gives one number to values that the pass may exchange.
        before: the graph before the pass.
        after: what the pass left.
        name: of the pass.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller gets another value, or an update begins too early.
    """
    numbers = Numbers()
    earlier, later = read(before, numbers, name, walk), read(after, numbers, name, walk)
    compare(later, earlier, name)
    update_judge.check(later.updates, earlier.updates, name)


def _check_exact(graph: TrainGraph, after: str, lossy: Sequence[str], fast: bool) -> None:
    """Refuse codecs, products, rows, groups and masks that are not exact and that :func:`check` may not allow.

    Raises:
        VerifyError: names the first, and the option that allows it.
    """
    for encoding in graph.encodings:
        if encoding.error and encoding.codec not in lossy:
            raise VerifyError(
                f"after pass {after!r}: {encoding.storage} is kept by codec {encoding.codec!r}, which has "
                f"an error of {encoding.error:g}: allow it with options={{'codecs': {encoding.codec!r}}}, or plan again"
            )
    if fast:
        return
    other = next((node for node in graph.graph.nodes if node.target in OTHER_SUMS), None)
    if other is not None:
        raise VerifyError(
            f"after pass {after!r}: {other.name} is {other.target}, which sums in another order than "
            f"{OTHER_SUMS[other.target]}: allow it with options={{'numerics': 'fast'}}, or plan again"
        )
    padded = next((node for node in graph.graph.nodes if node.target is rows_padded), None)
    if padded is not None:
        raise VerifyError(
            f"after pass {after!r}: {padded.name} moves rows apart, of which products have other last bits: "
            "allow it with options={'numerics': 'fast'}, or plan again"
        )
    inexact = (node for node in graph.graph.nodes if isinstance(node.target, Composite) and not node.target.exact)
    group = next(inexact, None)
    if group is not None:
        raise VerifyError(
            f"after pass {after!r}: {group.name} is {name_of(group.target)}, which has other last bits than "
            "its operators one by one: allow it with options={'numerics': 'fast'}, or plan again"
        )
    seeds = next((node for node in graph.graph.nodes if node.target is draw_seeds), None)
    if seeds is not None:
        raise VerifyError(
            f"after pass {after!r}: {seeds.name} draws seeds of dropouts, which then keep other elements than eager: "
            "allow it with options={'numerics': 'fast'}, or plan again"
        )


def _check_kinds(graph: TrainGraph, flow: Flow, after: str) -> None:
    """Refuse readers of what a codec with an error has decoded that it does not serve.

    Raises:
        VerifyError: names the first, how it reads the storage, and the codec.
    """
    kinds = ReaderKinds(graph)
    for reader, argument, encoding in flow.lossy:
        kind = kinds.of(reader, position_in(reader, argument))
        if kind not in encoding.serves:
            served = ", ".join(repr(each.value) for each in Kind if each in encoding.serves) or "none"
            raise VerifyError(
                f"after pass {after!r}: {reader.name} reads {encoding.storage} as {kind.value!r}, decoded by codec "
                f"{encoding.codec!r}, which errs and serves {served}; {way_out(after)}"
            )


def _check_kept(graph: TrainGraph, before: Flow, flow: Flow, after: str) -> None:
    """Refuse a pass that has what :func:`roamc.keep` keeps computed once more, or encoded.

    Where an operator that is not kept had the same value as one that is, a new one with that value is taken for another
    run of the former.

    Raises:
        VerifyError: names the operator that is kept, and what has become of it.
    """
    nodes = (node for node in graph.graph.nodes if graph.phase.get(node.name) is Phase.FORWARD and is_kept(node))
    names = {node.name for node in nodes if node.name in before.operators}
    if not names:
        return
    kept = {number: name for name, number in before.operators.items() if name in names}
    for name, number in before.operators.items():
        if name not in names:
            kept.pop(number, None)
    for node in graph.graph.nodes:
        again = kept.get(flow.operators.get(node.name, -1))
        if again and node.name not in before.operators and not isinstance(node.target, Composite):
            raise VerifyError(f"after pass {after!r}: {node.name} runs {again} again, which roamc.keep keeps")
    for encoding in graph.encodings:
        if maker_of(encoding.storage) in names:
            raise VerifyError(f"after pass {after!r}: {encoding.storage} is encoded, which roamc.keep keeps")
