"""What roamc knows of operators: one table in chapters, and the operators and kernels of its own.

ops.py              what all chapters say of an operator, joined, and what follows for a call: other folders ask here
table.py            chapter: aliases, random numbers, in-place writes, forms with out=, ranges of indices
costs/              chapter: what bounds the time, what is read, FLOPs, workspace
kernels.py          chapter: functions of ours that write into planned memory
corrections.py      chapter: results that differ from what torch's fake kernels give; fakes.py: fake kernels of ours
out_variants.py     how an operator puts its results into planned memory, which follows from the chapters

random.py, projection.py, activations.py, norm_inputs.py, counter.py   operators of ours for masks and codecs
collectives.py, split_collectives.py, shards.py, effects.py            and for ranks and checks
schemas.py, call.py, index_ranges.py    names, arguments and calls
"""
