"""What a plan and its graph say to a reader: the analysis as data, and its text."""
