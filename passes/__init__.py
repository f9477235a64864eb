"""Graph passes. One pass is one file with a ``NAME``, a frozen ``Decision``, ``decide`` and ``apply``.

``decide(graph, options) -> Decision`` may call a solver and changes nothing; ``apply(graph, decision) ->
TrainGraph`` decides nothing. The runner in :mod:`roamc.planning.pipeline` checks the graph after every pass.
"""
