"""Rewritings of a graph, and questions about it, that several passes share; no pass knows another.

arrange.py         operators in another order
rerun.py           operators run a second time; rerun_variants.py what to call where the operator itself cannot be,
                   expiry.py which operators may run again, and until when
versions.py        a storage made a second time, and which version each reader reads
in_place.py        results that may be written over an argument
order_problem.py   the graph as numbers for :mod:`roamc.solvers.order`
"""
