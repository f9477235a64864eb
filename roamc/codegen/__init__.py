"""From a planned graph to Python source that runs it over one arena."""
