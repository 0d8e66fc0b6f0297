"""`braid view`: an index of a run's trajectories, a page that shows runs, and the page as one file."""
