"""One file per way in: ``joint`` from inside torch.compile, ``step`` for a whole training step."""
