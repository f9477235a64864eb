"""Graphs from the files that torch writes: ``TORCH_TRACE`` logs, ``TORCH_LOGS`` output, printed joint graphs, ``.pt2``.

Nothing of a file is executed, and a process with limits reads it (:mod:`confined`, :mod:`files`). :mod:`text` turns
lines into plain data, which needs no torch; :mod:`trace_log` finds the graphs of a log and what it says of inputs;
:mod:`build` makes an FX graph of fake tensors out of plain data, with operators of a closed table (:mod:`names`);
:mod:`graphs` hands it to :func:`roamc.capture.joint.stitch`, like a graph that torch.compile captures. :mod:`archive`
reads a ``.pt2``, and :mod:`exported` makes a module of it.
"""
