"""From a captured graph to a plan: the pipeline of passes, and the search for a plan under a memory budget."""
