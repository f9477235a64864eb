"""What several passes write into a graph or ask of it; each of them decides on top of this and knows no other pass.

arrange.py         operators in another order
rerun.py           operators run a second time; rerun_variants.py where an operator cannot be called again itself,
                   expiry.py what may run again, and until when
versions.py        a storage made a second time, and who reads which
in_place.py        results that may be written over an argument
order_problem.py   the graph as numbers for :mod:`roamc.solvers.order`
"""
