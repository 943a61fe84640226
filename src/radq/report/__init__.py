"""Reports, which show the results of sweeps as tables, plots and one HTML page."""
