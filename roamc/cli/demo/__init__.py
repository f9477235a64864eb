"""``roamc demo``: train a small language model with and without roamc, in step, and compare.

``text`` reads the data, ``worker`` is one side in a process of its own, ``race`` runs all sides in
lockstep, ``show`` prints what was measured.
"""
