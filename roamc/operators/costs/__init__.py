"""What operators cost: the chapter of the operator table on what bounds their time, FLOPs and workspace.

    cost.py      what a row says
    kinds.py     the kinds of operators: what bounds their time
    rows.py      the rows

    flops.py                        formulas for multiplications and additions
    arguments.py                    tests of strides: arguments that pass are read as they are, others copied
    attention.py, collectives.py,
    convolutions.py, images.py,
    linear_algebra.py, lookups.py,
    norms.py, products.py,
    softmax.py, others.py           formulas for workspace, on a CPU
    gpu.py                          the same, on a GPU

A formula for workspace takes a call and its first fake result, and returns the bytes beside arguments and results while
the call runs: those of each of torch's threads if its name ends in ``per_thread``, else all others. It is 0 where its
docstring names no bytes. Half precision is computed in float32.

:func:`roamc.operators.ops.rule` joins a row with what the operator's tags say.
"""
