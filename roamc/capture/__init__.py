"""Capture as an FX graph: ``joint`` from inside torch.compile, ``step`` for a whole training step."""
