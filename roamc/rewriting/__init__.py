"""Rewritings of a graph, and questions about it, that several passes share; no pass knows another.

arrange.py         operators in another order
reruns.py          operators that run a second time, as data, and where in a graph they are written
rerun.py           writes them; rerun_variants.py what to call where the operator itself cannot be called again
rerun_readers.py   from reruns at places in an order to those that name their readers
expiry.py          which operators may run again, and until when
versions.py        a storage made a second time, for some of its readers
split.py           collectives as a start and a wait
names.py           names for new nodes
repeats.py         operators that repeat another one, and go; gathers.py the same of gathers in backward
dropouts.py        a dropout as a mask and a product
in_place.py        results that may be written over an argument
order_problem.py   the graph as numbers for :mod:`roamc.solvers.order`
"""
