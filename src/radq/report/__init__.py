"""Reports: the results of a sweep as tables, plots and one HTML page."""
