"""How a run is seen: records from its threads, and one monitor that owns files, plots and the terminal."""
