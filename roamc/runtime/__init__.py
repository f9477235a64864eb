"""What runs at every step: blocks of memory, arenas over them, programs bound to arenas, and the fallback."""
