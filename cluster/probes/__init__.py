"""Whether a new worker works: a tiny request through it, before it counts as ready."""
