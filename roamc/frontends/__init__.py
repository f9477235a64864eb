"""The ways in from Python: the torch.compile backend, ``optimize``, ``train_step`` and ``max_batch``."""
