"""HTTP between the parts of a run, JSON only: who may ask (`access`), what answers (`serving`), asking (`asking`)."""
