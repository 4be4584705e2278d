"""What was learned: metrics and tables, from the records of a run alone."""
