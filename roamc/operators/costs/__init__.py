"""What operators cost: the chapter of the operator table on what bounds their time, FLOPs and workspace.

    cost.py      what a row says
    kinds.py     the kinds of operators: what bounds their time
    rows.py      the rows

    flops.py                        formulas for multiplications and additions
    arguments.py                    tests of strides: arguments that pass are read as they are, others copied
    attention.py, convolutions.py,
    linear_algebra.py, lookups.py,
    products.py, softmax.py,
    others.py                       formulas for workspace, on a CPU
    gpu.py                          the same, on a GPU

:func:`roamc.operators.ops.rule` joins a row with what the operator's tags say.
"""
