"""One file per table of RESULTS.md; results, with machine, versions and date, in ``benchmarks/results``."""
