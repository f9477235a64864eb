"""How groups of operators run on a GPU: one Triton kernel each, printed from the group's graph."""
