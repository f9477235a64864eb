"""Effect tokens, taken out of AOTAutograd's graphs.

torch wraps operators with an effect, such as the check behind ``torch.linalg.inv``, and strings them on tokens:

    with_effects = with_effects(token, aten._linalg_check_errors, info, ...)
    token_1 = with_effects[0]

Tokens are inputs and outputs of the graph, traced as empty tensors; at run time torch passes None and drops what comes
back. Here they become None from the start, and the operator table keeps what has an effect in its order:

    with_effect = with_effect(aten._linalg_check_errors, info, ...)
"""

from __future__ import annotations

import operator

from torch import fx

from roamc.compat import HigherOrderOperator, lazy_module
from roamc.graph import output_node
from roamc.operators.effects import with_effect


def without_tokens(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module of the same graph without effect tokens; ``module`` itself if it has none.

    ``module`` is not changed. The new graph has as many inputs and outputs; each that was a token is None. Its nodes
    have their old names; those that pick a token out of a result are gone.
    """
    if not any(_has_token(node) for node in module.graph.nodes):
        return module
    plain = fx.Graph()
    plain.output(plain.graph_copy(module.graph, {}))
    effects = [node for node in plain.nodes if _has_token(node)]
    picks = [user for node in effects for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    for node in effects:
        token, *rest = node.args
        if isinstance(token, fx.Node) and token.op == "placeholder":
            token.meta["val"] = None
        node.target, node.args = with_effect, tuple(rest)
        node.meta["val"] = (None, *node.meta["val"][1:])
    end = output_node(plain)
    end.args = fx.map_arg(end.args, lambda node: None if node in picks else node)
    for pick in picks:
        plain.erase_node(pick)
    return lazy_module(module, plain)


def _has_token(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "with_effects"
