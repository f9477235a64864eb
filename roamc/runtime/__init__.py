"""What runs at every step: arenas, kernels that write where they are told, bound programs."""
