"""Reports on a plan and its graph: the analysis as data, as text, and as an HTML page."""
