"""One file per table of the README; results, with machine, versions and date, in ``benchmarks/results``."""
