"""What operators cost: the chapter of the operator table that says how long they take and what they take beside.

    cost.py      what a row says
    kinds.py     the kinds of operators: what bounds their time
    rows.py      the rows

    flops.py                        formulas for multiplications and additions
    arguments.py                    how arguments lie that a kernel reads as they are
    attention.py, convolutions.py,
    linear_algebra.py, lookups.py,
    products.py, others.py          formulas for workspace, on a CPU

:func:`roamc.operators.ops.rule` joins a row with what the operator's tags say.
"""
